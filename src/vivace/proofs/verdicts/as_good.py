"""As good? Paired by prompt and seed, by several witnesses, each with a test of equivalence over the prompts.

The claim is proven by a witness that reads the prompt (CLIP, BLIP) and the witnesses of the image itself together. A
model alone does not notice cut steps; sharpness alone does not notice that the dog is gone. If every image is the same
as the reference's, no witness of the prompt is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vivace.benchmark.studies import USUAL_SCORER
from vivace.errors import UnknownModel, Unsupported
from vivace.foundation.spec.limits import CLIP_LIMIT, DEFAULT_LIMITS, WITNESS_LIMIT
from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.measure.witness_limits import calibrated_limit, calibrated_limits, limit_note
from vivace.models.scorers import EMBEDDED, LocatedScorer, find_scorer, find_witness
from vivace.proofs.checks.pair_figures import WITNESSES, ImageWitness, PairFigures, add_scores
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.side import OnRead
from vivace.proofs.verdicts.legible import RapidReader, find_reader, words_of
from vivace.proofs.verdicts.same import (
    Metrics,
    ProofAnswer,
    ProofVerdict,
    decide,
    difference_in_words,
    means,
)


class Standing(StrEnum):
    SAME = "same"
    WORSE = "worse"
    BETTER = "better"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True)
class WitnessResult:
    """The result of one witness.

    Attributes:
        a, b: mean values.
        word: a word for images that are worse or better, e.g. "softer".
        difference: in words, with its 90 % interval.
        reads_prompt: whether the witness compares the image with its prompt.
    """

    witness: str
    a: float
    b: float
    standing: Standing
    word: str
    difference: str
    margin: str
    test: EquivalenceTest
    reads_prompt: bool = False


# An attention kernel, a tile of a decoder or a table of positions may be wrong for one aspect ratio and right for
# others.
@dataclass(frozen=True)
class SizeFigures:
    size: str
    num_pairs: int
    metrics: Metrics


_SIDES = {Equivalence.BELOW: "lower", Equivalence.ABOVE: "higher"}
_CAP = 1.0  # of the margin: one lost image counts as an image of something else, and no more


def witness_results(pairs: Sequence[PairFigures], limits: dict[str, float]) -> list[WitnessResult]:
    """Return each witness's result. `limits` are shares of the margin to keep, by the models that read prompts."""
    sound = [pair for pair in pairs if pair.a.alone and pair.b.alone]
    if not sound:
        return []
    results = [_of_prompts(sound, name, limit) for name, limit in limits.items()]
    return [t for t in results if t is not None] + [_of_images(sound, witness) for witness in WITNESSES]


def worse_at_a_size(pairs: Sequence[PairFigures], limits: dict[str, float]) -> list[WitnessResult]:
    """Return what witnesses call worse at some sizes only."""
    groups = _by_size([pair for pair in pairs if pair.is_complete])
    if len(groups) < 2:
        return []
    worse = [
        replace(result, witness=f"{result.witness} at {size}")
        for size, part in groups.items()
        for result in witness_results(part, limits)
        if result.standing is Standing.WORSE
    ]
    times = Counter(result.witness.partition(" at ")[0] for result in worse)
    return [result for result in worse if times[result.witness.partition(" at ")[0]] < len(groups)]


def figures_by_size(pairs: Sequence[PairFigures]) -> tuple[SizeFigures, ...]:
    groups = _by_size([pair for pair in pairs if pair.against])
    figures = [
        SizeFigures(size, len(part), means([p.against for p in part])) for size, part in groups.items()
    ]
    return tuple(sorted(figures, key=lambda each: each.metrics["match"])) if len(groups) > 1 else ()


def _by_size(pairs: Sequence[PairFigures]) -> dict[str, list[PairFigures]]:
    groups: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        groups.setdefault(pair.size or "{}x{}".format(*(pair.a.size or (0, 0))), []).append(pair)
    return groups


def as_good(
    results: Sequence[WitnessResult],
    *,
    is_same_picture: bool,
    is_rounding: bool,
    broken: str,
    shows_something: bool,
) -> ProofAnswer:
    """Return whether B's images are as good as A's; if they differ by rounding alone, no witness is needed."""
    worse, unclear, better = (
        [t for t in results if t.standing is standing]
        for standing in (Standing.WORSE, Standing.UNCLEAR, Standing.BETTER)
    )
    is_read = is_same_picture or any(t.reads_prompt for t in results)
    names = ", ".join(t.witness for t in results)
    random = "images of random weights show nothing that could be good"
    unread = "the images are others, and no model is here that reads the prompts; add --scorer NAME"
    within = f"within the margin by {names}" + "".join(f"; {t.word} ({t.witness})" for t in better)
    in_words = "; ".join(f"{t.word} ({t.witness} {t.difference})" for t in worse)
    return decide(
        (broken, ProofVerdict.FAILED, f"broken images, where A's are whole: {broken}"),
        (not results, ProofVerdict.UNCLEAR, "no pair of images to compare"),
        (worse, ProofVerdict.FAILED, in_words),
        (is_rounding, ProofVerdict.PROVEN, "every image differs by rounding at most"),
        (not shows_something, ProofVerdict.UNCLEAR, random),
        (not is_read, ProofVerdict.UNCLEAR, unread),
        (unclear, ProofVerdict.UNCLEAR, _what_decides(unclear)),
        (True, ProofVerdict.PROVEN, within),
    )


def _what_decides(unclear: Sequence[WitnessResult]) -> str:
    names = ", ".join(t.witness for t in unclear)
    needed = [t.test.needed for t in unclear if t.test.needed is not None]
    if len(needed) < len(unclear) or not needed:
        return f"too close to the margin: {names}"
    return f"too few prompts for {names}; about {max(needed)} prompts would tell"


def _of_images(pairs: Sequence[PairFigures], witness: ImageWitness) -> WitnessResult:
    values = [(pair.a.alone[witness.name], pair.b.alone[witness.name]) for pair in pairs]
    test = equivalence(
        [witness.difference(a, b) for a, b in values], [pair.prompt for pair in pairs], witness.margin
    )
    words = {Equivalence.BELOW: witness.lower, Equivalence.ABOVE: witness.higher}
    worse = [side for side in words if witness.worse in ("either", _SIDES[side])]
    a, b = (sum(column) / len(values) for column in zip(*values, strict=True))
    return WitnessResult(
        witness.name,
        a,
        b,
        _standing(test.verdict, worse),
        words.get(test.verdict, ""),
        difference_in_words(test, witness.in_words),
        witness.margin_in_words,
        test,
    )


def _of_prompts(pairs: Sequence[PairFigures], name: str, limit: float) -> WitnessResult | None:
    """Return a prompt-reading model's result; None if the reference's images do not fit their prompts either."""
    scored = [
        (pair.prompt, pair.a.scores[name], pair.b.scores[name][0])
        for pair in pairs
        if name in pair.a.scores and name in pair.b.scores
    ]
    margin = sum(own - others for _, (own, others), _ in scored) / len(scored) if scored else 0.0
    if not margin > 0:
        return None
    changes = [max(-_CAP, min(_CAP, (of_b - own) / margin)) for _, (own, _), of_b in scored]
    test = equivalence(changes, [prompt for prompt, _, _ in scored], 1 - limit)
    standing = _standing(test.verdict, [Equivalence.BELOW])
    # Images that are certainly not worse need not be shown to be no better.
    if standing is Standing.UNCLEAR and test.interval.low is not None and test.interval.low > limit - 1:
        standing = Standing.SAME
    words = {Equivalence.BELOW: "further from the prompts", Equivalence.ABOVE: "nearer to the prompts"}
    return WitnessResult(
        name,
        sum(own for _, (own, _), _ in scored) / len(scored),
        sum(of_b for _, _, of_b in scored) / len(scored),
        standing,
        words.get(test.verdict, ""),
        f"{difference_in_words(test, lambda share: f'{100 * share:+.1f}', ' %')} of the margin",
        f"±{100 * (1 - limit):g} %",
        test,
        reads_prompt=True,
    )


def _standing(verdict: Equivalence, worse: Sequence[Equivalence]) -> Standing:
    if verdict in worse:
        return Standing.WORSE
    return {Equivalence.WITHIN: Standing.SAME, Equivalence.UNCLEAR: Standing.UNCLEAR}.get(
        verdict, Standing.BETTER
    )


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
    reader: RapidReader | None = None
    notes: tuple[str, ...] = ()
    model: str = ""

    @classmethod
    def of(cls, plan: ProofPlan, scorer: str | None = "auto", witness: str | None = None) -> Judges:
        """Return the models that judge these images; for `scorer` and `witness` see `vivace.bench`."""
        if not plan.knows_prompts or not plan.shows_something:
            return cls()
        blip = find_witness(witness) if witness is not None else None
        clip, why = _find_clip(plan, scorer)
        located = plan.a.located or plan.b.located
        model = "" if located is None else f"{located.model.name}@{located.model.revision}"
        notes = [why]
        notes += [limit_note(model, clip.id, "clip")] if clip is not None else []
        notes += [limit_note(model, blip.id, "blip")] if blip is not None else []
        asks = any(words_of(prompt) for prompt in plan.prompts)
        reader = find_reader(plan.request.threads) if asks else None
        return cls(clip, blip, reader, tuple(note for note in notes if note), model)

    @property
    def all(self) -> list[LocatedScorer]:
        return [judge for judge in (self.clip, self.blip) if judge is not None]

    def add_scores(self, pairs: Sequence[PairFigures], is_read: OnRead = lambda: None) -> dict[str, float]:
        """Score all images by all models; return the share of the margin that must be kept, by the model's name."""
        prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
        images = [(pair.prompt, image) for pair in pairs for image in (pair.a, pair.b)]
        if len(prompts) < 2:  # there are no other prompts to be better than
            return {}
        scores, limits = {}, {}
        if self.clip is not None:
            scores["CLIP"] = _clip(self.clip, prompts)
            calibrated = calibrated_limits(DEFAULT_LIMITS, self.model, self.clip.id)
            limit = calibrated.for_scorer(self.clip.id).clip
            limits["CLIP"] = limit if isinstance(limit, float) else CLIP_LIMIT
        if self.blip is not None:
            scores["BLIP"] = _blip(self.blip)
            limits["BLIP"] = calibrated_limit(self.model, self.blip.id) or WITNESS_LIMIT
        is_read()
        for name, score in scores.items():
            add_scores(images, prompts, name, score)
        return limits


def _find_clip(plan: ProofPlan, scorer: str | None) -> tuple[LocatedScorer | None, str]:
    if scorer == "auto":
        own = [s.located.entry.scorer for s in (plan.a, plan.b) if s.located and s.located.entry]
        scorer = own[0] if own and own[0] else EMBEDDED if plan.prompt_set == "tinyworld" else USUAL_SCORER
        if scorer == USUAL_SCORER:
            try:
                return find_scorer(USUAL_SCORER, download=False), ""
            except (Unsupported, UnknownModel):
                return None, f"no CLIP model is on this machine; {USUAL_SCORER} is the usual one (--scorer)"
    return (None if scorer is None else find_scorer(scorer)), ""


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
