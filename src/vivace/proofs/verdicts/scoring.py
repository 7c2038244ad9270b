"""The models that read the prompt: CLIP, and BLIP as a second one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.studies import USUAL_SCORER
from vivace.errors import UnknownModel, Unsupported
from vivace.foundation.spec.limits import CLIP_LIMIT, DEFAULT_LIMITS, WITNESS_LIMIT
from vivace.measure.witness_limits import calibrated_limit, calibrated_limits, limit_note
from vivace.models.scorers import EMBEDDED, LocatedScorer, find_scorer, find_witness
from vivace.proofs.checks.pair_figures import PairFigures, add_scores
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.verdicts.legible import TextReader, find_reader, num_asking


@dataclass(frozen=True)
class Judges:
    """The models that score images, and the reader of the text in them.

    Attributes:
        reader: None if it is not installed, or no prompt asks for words.
        notes: reasons for missing models, and the sources of the limits.
        model: NAME@REVISION of A, or of B if only that is a model on this machine; "" if neither is.
    """

    clip: LocatedScorer | None = None
    blip: LocatedScorer | None = None
    reader: TextReader | None = None
    notes: tuple[str, ...] = ()
    model: str = ""

    @property
    def all(self) -> list[LocatedScorer]:
        return [judge for judge in (self.clip, self.blip) if judge is not None]


def find_all(plan: ProofPlan, scorer: str | None = "auto", witness: str | None = None) -> Judges:
    """Return the models that judge these images.

    Args:
        scorer: as of `vivace bench`: a CLIP model, None for none, or "auto": the embedded one for prompts of the
            embedded models, else the usual one if it is on this machine.
        witness: a BLIP model.

    Raises:
        UnknownModel, Unsupported: see `find_scorer`.
    """
    if not plan.knows_prompts or not plan.shows_something:
        return Judges()
    blip = find_witness(witness) if witness is not None else None
    clip, notes = _find_clip(plan, scorer)
    located = plan.a.located or plan.b.located
    model = "" if located is None else f"{located.model.name}@{located.model.revision}"
    if clip is not None:
        notes.append(limit_note(model, clip.id, "clip"))
    if blip is not None:
        notes.append(limit_note(model, blip.id, "blip"))
    reader = find_reader(plan.request.threads) if num_asking(plan.prompts) else None
    return Judges(clip, blip, reader, tuple(note for note in notes if note), model)


def _find_clip(plan: ProofPlan, scorer: str | None) -> tuple[LocatedScorer | None, list[str]]:
    """Return the CLIP model, or None with the reason."""
    if scorer == "auto":
        own = [s.located.entry.scorer for s in (plan.a, plan.b) if s.located and s.located.entry]
        scorer = own[0] if own and own[0] else EMBEDDED if plan.prompt_set == "tinyworld" else USUAL_SCORER
        if scorer == USUAL_SCORER:
            try:
                return find_scorer(USUAL_SCORER, download=False), []
            except (Unsupported, UnknownModel):
                return None, [f"no CLIP model is on this machine; {USUAL_SCORER} is the usual one (--scorer)"]
    return None if scorer is None else find_scorer(scorer), []


def add_all_scores(
    pairs: Sequence[PairFigures], judges: Judges, is_read: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Score all images by all models; return the share of the margin that must be kept, by the model's name.

    Args:
        is_read: called when the models are loaded.
    """
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    images = [(pair.prompt, image) for pair in pairs for image in (pair.a, pair.b)]
    if len(prompts) < 2:  # there are no other prompts to be better than
        return {}
    scores, limits = {}, {}
    if judges.clip is not None:
        scores["CLIP"] = _clip(judges.clip, prompts)
        limit = (
            calibrated_limits(DEFAULT_LIMITS, judges.model, judges.clip.id).for_scorer(judges.clip.id).clip
        )
        limits["CLIP"] = limit if isinstance(limit, float) else CLIP_LIMIT
    if judges.blip is not None:
        scores["BLIP"] = _blip(judges.blip)
        limits["BLIP"] = calibrated_limit(judges.model, judges.blip.id) or WITNESS_LIMIT
    is_read()
    for name, score in scores.items():
        add_scores(images, prompts, name, score)
    return limits


def _clip(located: LocatedScorer, prompts: Sequence[str]) -> Any:
    from vivace.measure.scorer import ClipScorer, FunctionScorer
    from vivace.models.quiet import quiet

    if located.is_function:
        function = FunctionScorer(located.name, located.folder)
        return lambda images, prompts: [function.scores([image] * len(prompts), prompts) for image in images]

    with quiet():
        scorer = ClipScorer(located.folder)
    of_prompts = scorer.embed_prompts(prompts)
    return lambda images, _: 100 * scorer.embed_images(images) @ of_prompts.T


def _blip(located: LocatedScorer) -> Any:
    from vivace.measure.scorer import Witness
    from vivace.models.quiet import quiet

    with quiet():
        witness = Witness(located.folder)
    return lambda images, prompts: [witness.scores(image, prompts) for image in images]
