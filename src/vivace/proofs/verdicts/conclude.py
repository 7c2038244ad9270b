"""The proof, once both sides are drawn: read the images, compare, ask the witnesses, check the requests, decide."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vivace.answers.formatting import count
from vivace.measure.scorer import Lpips
from vivace.proofs.checks.endpoint_checks import check_all
from vivace.proofs.checks.findings import ImageFinding, find_broken, find_faults
from vivace.proofs.checks.pair_figures import (
    ROUNDING_DB,
    PairFigures,
    ReadImage,
    StoredImages,
    compare_pair,
    find_lpips,
)
from vivace.proofs.checks.request_checks import ServerCheck, Status
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.jobs import main_jobs, own_jobs, timing_jobs
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.side import DrawJob, ImageSettings
from vivace.proofs.verdicts.as_good import as_good, witness_results
from vivace.proofs.verdicts.fast import speed
from vivace.proofs.verdicts.legible import NOTHING_READ, Legibility, left_out, legibility
from vivace.proofs.verdicts.proof import (
    Claim,
    FailUnder,
    Failure,
    Proof,
    figures_by_size,
    with_worst_size,
    worse_at_a_size,
)
from vivace.proofs.verdicts.same import OwnDistances, add_nearness, means, same_picture
from vivace.proofs.verdicts.scoring import Judges, add_all_scores
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict, decide

_MOST_NAMES = 2
_LETTERS: tuple[Letter, ...] = ("a", "b")


@dataclass(frozen=True)
class Options:
    """Settings of a proof's judgement.

    Attributes:
        claims: those that decide the exit code; empty for all that apply.
        fail_under: limits on the means of metrics.
        loads: measurements of endpoints under load.
    """

    claims: tuple[Claim, ...] = ()
    fail_under: Mapping[str, float] | None = None
    loads: tuple[SideLoad, ...] = ()


def conclude(
    plan: ProofPlan,
    store: ProofStore,
    judges: Judges,
    options: Options,
    is_read: Callable[[], None] = lambda: None,
) -> Proof:
    """Compare both sides' images, and decide. Requests of an endpoint's own checks are sent now.

    Args:
        is_read: called when the judges' models are loaded.
    """
    images, lpips = StoredImages(store), find_lpips()
    pairs = [_compare(plan, job, images, lpips) for job in main_jobs(plan)]
    own = _own_distances(plan, images, lpips)
    add_nearness(pairs, own)
    limits = add_all_scores(pairs, judges, is_read) if plan.knows_prompts else {}
    sizes = figures_by_size(pairs)
    same = with_worst_size(same_picture(pairs), sizes)
    results = [*witness_results(pairs, limits), *worse_at_a_size(pairs, limits)]
    good = as_good(
        results,
        is_same_picture=same.verdict is ProofVerdict.PROVEN,
        is_rounding=all(p.against and p.against["psnr_db"] >= ROUNDING_DB for p in pairs if p.is_complete),
        broken="; ".join(finding.summary for finding in find_broken(pairs)),
        shows_something=plan.shows_something,
    )
    findings = find_faults(plan, pairs, images)
    checks = tuple(check_all(plan, images))
    reached = means([pair.against for pair in pairs if pair.against])
    words = _words(plan, pairs, judges)
    return Proof(
        a=plan.a.text,
        b=plan.b.text,
        claims=options.claims or tuple(_default_claims(plan, words)),
        settings={letter: _shared_settings(pairs, letter) for letter in _LETTERS},
        requested_sizes=tuple(map(str, plan.request.sizes)),
        sizes=sizes,
        num_seeds=len({seed for _, seed in plan.pairs}),
        num_prompts=len(plan.prompts),
        knows_prompts=plan.knows_prompts,
        pairs=tuple(pairs),
        own=own,
        witness_results=tuple(results),
        checks=checks,
        findings=tuple(findings),
        failures=tuple(_failures(pairs)),
        notes=(*_notes(plan, pairs, own), *judges.notes, *words.notes, *_resumed(plan, store)),
        same=same,
        good=good,
        legibility=words,
        honest=honest(checks, findings),
        speed=speed(
            pairs, plan.a.untimed or plan.b.untimed, _seconds_again(plan, store, options), options.loads
        ),
        fail_under=tuple(
            FailUnder(name, limit, reached.get(name)) for name, limit in (options.fail_under or {}).items()
        ),
    )


def honest(checks: Sequence[ServerCheck], findings: Sequence[ImageFinding]) -> ProofAnswer:
    """Return whether B follows its requests.

    Args:
        findings: faults of its images as a set.
    """
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


def _compare(plan: ProofPlan, job: DrawJob, images: StoredImages, lpips: Lpips | None) -> PairFigures:
    has_several_sizes = len(plan.settings_by_size) > 1
    a, b = (images.image(letter, job) for letter in _LETTERS)
    pair = compare_pair(job, a, b, lpips, names_size=has_several_sizes)
    pair.request = plan.b.request_text(job)
    return pair


def _shared_settings(pairs: Sequence[PairFigures], letter: Letter) -> dict[str, Any]:
    """Return how the images of a side were drawn, where all say the same."""
    drawn = [(pair.settings, pair.image(letter)) for pair in pairs if pair.image(letter).is_there]
    every = [asked.call if image.kept.settings is None else image.kept.settings for asked, image in drawn]
    return {k: v for k, v in every[0].items() if all(each.get(k) == v for each in every)} if every else {}


def _words(plan: ProofPlan, pairs: Sequence[PairFigures], judges: Judges) -> Legibility:
    if not plan.knows_prompts:
        return NOTHING_READ
    if not plan.shows_something:
        return left_out("images of random weights have no words")
    return legibility(pairs, judges.reader)


def _resumed(plan: ProofPlan, store: ProofStore) -> Iterator[str]:
    """Yield the side that was drawn by several processes after an interruption; each process has its own latency."""
    for letter in _LETTERS:
        images = [store.image(letter, job) for job in main_jobs(plan)]
        number = len({image.process for image in images if image is not None and image.path is not None})
        if number > 1:
            yield f"{letter.upper()}: its images were drawn in {number} runs, each with its own latency"


def _seconds_again(plan: ProofPlan, store: ProofStore, options: Options) -> list[float | None] | None:
    """Return A's seconds when it was drawn again after B; None without the claim "fast"."""
    images = [store.image("a", job) for job in timing_jobs(plan)]
    seconds = [None if image is None else image.seconds for image in images]
    return seconds if "fast" in options.claims else None


def _default_claims(plan: ProofPlan, words: Legibility) -> Iterator[Claim]:
    yield "as-good"
    if words.answer.verdict is not ProofVerdict.LEFT_OUT:
        yield "legible"
    if isinstance(plan.b, EndpointSide):
        yield "honest"


def _own_distances(plan: ProofPlan, images: StoredImages, lpips: Lpips | None) -> OwnDistances:
    """Return the metrics of A's images against its repetitions, and against other seeds of the same prompt."""
    own = own_jobs(plan)
    by_prompt: dict[tuple[str, ImageSettings], list[DrawJob]] = {}
    for job in (*main_jobs(plan), *(job for job in own if not job.repeat)):
        by_prompt.setdefault((job.prompt, job.settings), []).append(job)
    others = itertools.chain.from_iterable(itertools.pairwise(jobs) for jobs in by_prompt.values())

    def metrics(jobs: Iterable[tuple[DrawJob, DrawJob]]) -> tuple[dict[str, float], ...]:
        pairs = (compare_pair(a, images.image("a", a), images.image("a", b), lpips) for a, b in jobs)
        return tuple(pair.against for pair in pairs if pair.against)

    return OwnDistances(
        metrics((replace(job, repeat=0), job) for job in own if job.repeat),
        metrics(itertools.islice(others, 2 * len(by_prompt))),
    )


def _failures(pairs: Sequence[PairFigures]) -> Iterator[Failure]:
    for pair in pairs:
        if not pair.a.is_there:
            yield Failure("A", pair.label, pair.a.reason, pair.a.kept.request)
        if not pair.b.is_there:
            yield Failure("B", pair.label, pair.b.reason, pair.b.kept.request)
        if pair.reason:
            yield Failure("B", pair.label, pair.reason)


def _notes(plan: ProofPlan, pairs: Sequence[PairFigures], own: OwnDistances) -> Iterator[str]:
    for letter in _LETTERS:
        images = [pair.image(letter) for pair in pairs]
        counted = Counter(text for image in images for text in image.notes)
        for text, number in counted.items():
            yield f"{letter.upper()}: {text} ({number} of {len(images)})"
        yield from _size_note(letter.upper(), images, pairs)
    if faults := [pair.a.faults for pair in pairs if pair.a.faults]:
        yield f"A: {len(faults)} broken images: {faults[0][0]}"
    if own.repeats_exactly is False:
        yield "A does not draw the same image twice; B is held to no more than that"
    if not plan.shows_something:
        yield "the model has random weights: its images show nothing"


def _size_note(side: str, images: Sequence[ReadImage], pairs: Sequence[PairFigures]) -> list[str]:
    """Return a note if a side's images do not have the requested size."""
    asked_for = [(pair.settings.width, pair.settings.height) for pair in pairs]
    off = [
        (image.size, size)
        for image, size in zip(images, asked_for, strict=True)
        if image.size is not None and None not in size and image.size != size
    ]
    if not off:
        return []
    got, size = ("{}x{}".format(*each) for each in off[0])
    return [f"{side}: {count(len(off), 'image')} of another size than asked for, e.g. {got} for {size}"]
