"""`vivace.prove`: draw both sides, compare, ask the witnesses, check the requests, decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SkipValidation, WrapValidator

from vivace.answers.formatting import count
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.settings import DEFAULT_STORE, Option, Scorer, Store, Witness, as_list, takes
from vivace.proofs.checks.pair_figures import (
    LETTERS,
    ROUNDING_DB,
    ImageFinding,
    PairFigures,
    StoredImages,
    compare_all,
    find_broken,
    find_instead,
    find_lpips,
)
from vivace.proofs.checks.request_checks import ServerCheck, Status, check_all
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.plan import DrawRequest, ProofPlan, prepare
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.side import DrawingFailure, ImageSettings, OnNote, OnRead
from vivace.proofs.verdicts.as_good import Judges, as_good, figures_by_size, witness_results, worse_at_a_size
from vivace.proofs.verdicts.fast import LoadRequest, OnLoad, SideLoad, SpeedAnswer, measure_loads, speed
from vivace.proofs.verdicts.legible import (
    HOW_TO_INSTALL,
    NOTHING_READ,
    Legibility,
    left_out,
    legibility,
    words_of,
)
from vivace.proofs.verdicts.proof import METRICS, Claim, FailUnder, Failure, Proof
from vivace.proofs.verdicts.same import (
    OwnDistances,
    ProofAnswer,
    ProofVerdict,
    add_nearness,
    decide,
    means,
    same_picture,
)

OnProgress = Callable[[Letter, int, int], None]
"""Called with the side, the number of its finished images, and the number of all."""
_MOST_IN_A_ROW = 5
"""Consecutive failures after which a side is not asked for the rest."""
_FOLDER = "prove"
"""Folder of images in the store."""
_MOST_NAMES = 2


def _limits(limits: str | Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Return the limits of "psnr_db=30,ssim=0.9", or check those of a mapping."""
    if limits is None:
        return None
    if isinstance(limits, str):
        parts = [part.partition("=") for part in limits.split(",")]
        limits = {name.strip(): number.strip() for name, _, number in parts}  # type: ignore[misc]
    if not isinstance(limits, Mapping):
        raise ValueError("must be a dictionary")
    checked = {}
    for name, limit in limits.items():
        if name not in METRICS:
            raise ValueError(f"{name!r} is not NAME=VALUE; NAME is one of {', '.join(METRICS)}")
        try:
            checked[name] = float(limit)
        except (TypeError, ValueError):
            raise ValueError(f"{limit!r} for {name} is not a number") from None
        low, high = METRICS[name]
        if not low <= checked[name] <= high:
            raise ValueError(f"{name}={limit} is not from {low:g} to {high:g}")
    return checked


class ProveSettings(LoadRequest, DrawRequest):
    """The settings of a proof, for the command and for `vivace.prove`; see `DrawRequest` and `LoadRequest`.

    Attributes:
        claims: "same", "as-good", "legible", "honest" and "fast", which decide `Proof.verdict`; none for those that
            apply, without "fast".
        fail_under: limits on the means of metrics: psnr_db, ssim, match (least), lpips (most).
        scorer, witness: the models that judge images, as for `vivace.bench`.
        reuse: also use the images of an earlier complete call.
        progress: called with "a" or "b", the number of its images that are done, and of all.
    """

    claims: Annotated[
        Sequence[Claim],
        WrapValidator(as_list),
        Option(
            "Claim to prove, for the exit code; repeat for more. Default: as-good, legible where words are read, "
            "honest for a server. fast draws A once more, after B.",
            "--claim",
        ),
    ] = ()
    fail_under: Annotated[
        Mapping[str, float] | None,
        BeforeValidator(_limits),
        Option(
            "Limits on B's mean distances to A: psnr_db, ssim, match (least), lpips (most).",
            metavar="NAME=VALUE,...",
        ),
    ] = None
    scorer: Scorer = "auto"
    witness: Witness = None
    reuse: Annotated[bool, Option("Also reuse the images of an earlier run that has ended.")] = False
    store: Store = Path(DEFAULT_STORE)
    progress: Annotated[OnProgress | None, SkipValidation] = None


@takes(ProveSettings)
def prove(a: str, b: str, settings: ProveSettings) -> Proof:
    """Prove that B draws the same images as A, or as good ones, and does what it is asked for.

    Images are kept in the store: after an interruption the same call goes on. A model is read in this process,
    without the limits on time and memory that the command has.

    Args:
        a, b: MODEL:RECIPE, a folder of images, http://HOST:PORT/v1, comfyui:http://HOST:PORT?workflow=FILE or
            python:MODULE:FUNCTION. A is the reference.
        settings: the fields of `ProveSettings`, as keywords: `claims=["same"]`, `num_prompts=4`.

    Raises:
        UsageError, RecipeError, UnknownModel, UnusableModel, Unsupported, WorkloadError, StoreError: see
            `vivace.errors`. Failures of single images are in `Proof.failures`.
    """
    prover = Prover.of(a, b, settings)
    for letter, again in prover.passes:
        prover.draw(letter, settings.progress or (lambda side, done, total: None), again=again)
    prover.measure_loads()
    return prover.conclude()


@dataclass
class Prover:
    """A proof that is being made: its passes draw, then loads are measured, then it is concluded."""

    settings: ProveSettings
    plan: ProofPlan
    judges: Judges
    store: ProofStore
    loads: tuple[SideLoad, ...] = ()

    @classmethod
    def of(cls, a: str, b: str, settings: ProveSettings) -> Prover:
        """Check everything that can be checked before anything is drawn; for the errors see `prove`."""
        plan = prepare(a, b, settings)
        judges = Judges.of(plan, settings.scorer, settings.witness)
        if "legible" in settings.claims:
            if not plan.knows_prompts or not any(map(words_of, plan.prompts)):
                raise UsageError(
                    "--claim legible: no prompt asks for words; put them in quotes, e.g. a shop sign that says "
                    '"OPEN"'
                )
            if judges.reader is None:
                raise Unsupported(f"--claim legible: no text reader is installed; {HOW_TO_INSTALL}")
        if "fast" in settings.claims and (reason := plan.a.untimed or plan.b.untimed):
            raise UsageError(f"--claim fast: {reason}")
        settings.check_loads(plan)
        return cls(
            settings, plan, judges, ProofStore(settings.store / _FOLDER, plan.identity, settings.reuse)
        )

    @property
    def passes(self) -> list[tuple[Letter, bool]]:
        """The order in which the sides are drawn: A, B, and for its latency A once more."""
        once: list[tuple[Letter, bool]] = [("a", False), ("b", False)]
        return [*once, ("a", True)] if "fast" in self.settings.claims else once

    def draw(
        self,
        letter: Letter,
        on_progress: OnProgress,
        is_read: OnRead = lambda: None,
        on_note: OnNote = lambda text: None,
        *,
        again: bool = False,
    ) -> None:
        """Draw the missing images of a side, or A's `again` for their seconds. A failure is kept with its reason."""
        jobs = self.plan.timing_jobs if again else self.plan.jobs_of(letter)
        todo = [job for job in jobs if not self.store.is_drawn(letter, job)]
        if not todo:
            return
        in_a_row = 0
        warm: set[ImageSettings] = set()  # the first image of each is a warm-up, whose seconds do not count
        with self.plan.side(letter).open(self.plan, is_read, on_note) as draw:
            for number, job in enumerate(todo, len(jobs) - len(todo) + 1):
                try:
                    if in_a_row >= _MOST_IN_A_ROW:
                        raise DrawingFailure(f"not asked for, after {_MOST_IN_A_ROW} failures in a row")
                    image = draw(job)
                except DrawingFailure as failure:
                    self.store.keep_failure(letter, job, failure)
                    in_a_row += 1
                else:
                    seconds = image.seconds if job.settings in warm else None
                    self.store.keep(letter, job, replace(image, seconds=seconds))
                    warm.add(job.settings)
                    in_a_row = 0
                on_progress(letter, number, len(jobs))

    def measure_loads(self, on_load: OnLoad = lambda text: None) -> None:
        self.loads = tuple(measure_loads(self.plan, self.store, self.settings, on_load))

    def conclude(self, is_read: OnRead = lambda: None) -> Proof:
        """Compare both sides' images, and decide. Requests of an endpoint's own checks are sent now."""
        plan, judges = self.plan, self.judges
        images, lpips = StoredImages(self.store), find_lpips()
        pairs = compare_all(plan, images, lpips)
        own = OwnDistances.of(plan, images, lpips)
        add_nearness(pairs, own)
        limits = judges.add_scores(pairs, is_read) if plan.knows_prompts else {}
        sizes = figures_by_size(pairs)
        same = same_picture(pairs)
        if sizes and sizes[0].metrics["match"] < sizes[-1].metrics["match"]:
            worst = f"the worst size is {sizes[0].size} (mean match {sizes[0].metrics['match']:.3f})"
            same = replace(same, reason=f"{same.reason}; {worst}")
        results = [*witness_results(pairs, limits), *worse_at_a_size(pairs, limits)]
        broken = list(find_broken(pairs))
        good = as_good(
            results,
            is_same_picture=same.verdict is ProofVerdict.PROVEN,
            is_rounding=all(
                pair.against and pair.against["psnr_db"] >= ROUNDING_DB for pair in pairs if pair.is_complete
            ),
            broken="; ".join(finding.summary for finding in broken),
            shows_something=plan.shows_something,
        )
        findings = (*broken, *find_instead(plan, pairs, images))
        checks = tuple(check_all(plan, images))
        reached = means([pair.against for pair in pairs if pair.against])
        words = self._legibility(pairs)
        proof = Proof(
            a=plan.a.text,
            b=plan.b.text,
            claims=tuple(self.settings.claims or self._default_claims(words)),
            settings={letter: _shared_settings(pairs, letter) for letter in LETTERS},
            requested_sizes=tuple(map(str, plan.request.sizes)),
            sizes=sizes,
            num_seeds=len({seed for _, seed in plan.pairs}),
            num_prompts=len(plan.prompts),
            knows_prompts=plan.knows_prompts,
            pairs=tuple(pairs),
            own=own,
            witness_results=tuple(results),
            checks=checks,
            findings=findings,
            failures=tuple(_failures(pairs)),
            notes=(*_notes(plan, pairs, own), *judges.notes, *words.notes),
            same=same,
            good=good,
            legibility=words,
            honest=honest(checks, findings),
            speed=self._speed(pairs),
            fail_under=tuple(
                FailUnder(name, limit, reached.get(name))
                for name, limit in (self.settings.fail_under or {}).items()
            ),
        )
        self.store.end()
        return proof

    def _legibility(self, pairs: Sequence[PairFigures]) -> Legibility:
        if not self.plan.knows_prompts:
            return NOTHING_READ
        if not self.plan.shows_something:
            return left_out("images of random weights have no words")
        return legibility(pairs, self.judges.reader)

    def _default_claims(self, words: Legibility) -> Iterator[Claim]:
        yield "as-good"
        if words.answer.verdict is not ProofVerdict.LEFT_OUT:
            yield "legible"
        if isinstance(self.plan.b, EndpointSide):
            yield "honest"

    def _speed(self, pairs: Sequence[PairFigures]) -> SpeedAnswer:
        again = None
        if "fast" in self.settings.claims:
            images = [self.store.image("a", job) for job in self.plan.timing_jobs]
            again = [None if image is None else image.seconds for image in images]
        return replace(speed(pairs, self.plan.a.untimed or self.plan.b.untimed, again), loads=self.loads)


def honest(checks: Sequence[ServerCheck], findings: Sequence[ImageFinding]) -> ProofAnswer:
    failed = [check.name for check in checks if check.status is Status.FAILED]
    num_passed = sum(check.status is Status.PASSED for check in checks)
    reasons = [finding.summary for finding in findings]
    if failed:
        names = list(dict.fromkeys(failed))
        more = ", …" if len(names) > _MOST_NAMES else ""
        number = f"{len(failed)} of {len(failed) + num_passed} checks failed"
        reasons.insert(0, f"{number} ({', '.join(names[:_MOST_NAMES])}{more})")
    return decide(
        (reasons, ProofVerdict.FAILED, "; ".join(reasons)),
        (num_passed, ProofVerdict.PROVEN, f"{count(num_passed, 'check')} passed"),
        (True, ProofVerdict.LEFT_OUT, "nothing that could be asked"),
    )


def _shared_settings(pairs: Sequence[PairFigures], letter: Letter) -> dict[str, Any]:
    drawn = [(pair.settings, pair.image(letter)) for pair in pairs if pair.image(letter).is_there]
    every = [asked.call if image.kept.settings is None else image.kept.settings for asked, image in drawn]
    return {k: v for k, v in every[0].items() if all(each.get(k) == v for each in every)} if every else {}


def _failures(pairs: Sequence[PairFigures]) -> Iterator[Failure]:
    for pair in pairs:
        if not pair.a.is_there:
            yield Failure("A", pair.label, pair.a.reason, pair.a.kept.request)
        if not pair.b.is_there:
            yield Failure("B", pair.label, pair.b.reason, pair.b.kept.request)
        if pair.reason:
            yield Failure("B", pair.label, pair.reason)


def _notes(plan: ProofPlan, pairs: Sequence[PairFigures], own: OwnDistances) -> Iterator[str]:
    for letter in LETTERS:
        counted = Counter(text for pair in pairs for text in pair.image(letter).notes)
        for text, number in counted.items():
            yield f"{letter.upper()}: {text} ({number} of {len(pairs)})"
    if faults := [pair.a.faults for pair in pairs if pair.a.faults]:
        yield f"A: {len(faults)} broken images: {faults[0][0]}"
    if not own.repeats_exactly:
        yield "A does not draw the same image twice; B is held to no more than that"
    if not plan.shows_something:
        yield "the model has random weights: its images show nothing"
