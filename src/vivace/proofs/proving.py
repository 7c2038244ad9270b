"""The proof, step by step: draw both sides, read the images, compare, ask the witnesses, decide."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.answers.formatting import count
from vivace.proofs.checks.examining import StoredImages, checks_of, endpoint_of, findings_of, request_for
from vivace.proofs.checks.image_findings import broken_in_words
from vivace.proofs.checks.pair_figures import ROUNDING_DB, Distances, PairFigures, ReadImage, compare_pair
from vivace.proofs.checks.server_checks import honest
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.sides.drawing import DrawingFailed, DrawJob, Settings
from vivace.proofs.sides.endpoint import Endpoint
from vivace.proofs.sides.prepare_sides import Prepared
from vivace.proofs.sides.probes import (
    main_jobs,
    own_jobs,
    probes,
    reference_jobs,
    repeat_jobs,
    timing_jobs,
)
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.verdicts.as_good import as_good, witness_results
from vivace.proofs.verdicts.fast import speed, untimed
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
from vivace.proofs.verdicts.verdict import ProofVerdict

if TYPE_CHECKING:
    from vivace.proofs.sides.drawing import Drawer

OnProgress = Callable[[Letter, int, int], None]
"""Called with the side, the number of its finished images, and the number of all."""
_MOST_IN_A_ROW = 5
"""Consecutive failures after which a side is not asked for the rest."""


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


def jobs_of(prepared: Prepared, letter: Letter) -> list[DrawJob]:
    """Return every image that a side draws, those of the prompts first."""
    jobs = main_jobs(prepared)
    if letter == "a":
        jobs += own_jobs(prepared) + reference_jobs(prepared)
    else:
        jobs += [job for probe in probes(prepared) for job in (probe.base, probe.job)]
        if prepared.b.draws:
            jobs += repeat_jobs(prepared)
    return list(dict.fromkeys(jobs))


def draw_side(
    prepared: Prepared,
    letter: Letter,
    store: ProofStore,
    on_progress: OnProgress = lambda letter, done, total: None,
    is_read: Callable[[], None] = lambda: None,
    on_note: Callable[[str], object] = lambda text: None,
    *,
    again: bool = False,
) -> None:
    """Draw the missing images of a side. An image that cannot be drawn is kept with its reason.

    Args:
        again: draw A's images once more, for their seconds.
    """
    jobs = timing_jobs(prepared) if again else jobs_of(prepared, letter)
    todo = [job for job in jobs if not store.is_drawn(letter, job)]
    if not todo:
        return
    source = prepared.a if letter == "a" else prepared.b
    with prepared.open(source, is_read, on_note) as drawer:
        in_a_row = 0
        warm: set[Settings] = set()
        for job in todo:
            if in_a_row >= _MOST_IN_A_ROW:
                failure = DrawingFailed(f"not asked for, after {in_a_row} failures in a row")
                store.keep_failure(letter, job, failure)
                continue
            in_a_row = 0 if _draw(drawer, letter, job, store, warm) else in_a_row + 1
            on_progress(letter, len(jobs) - len(todo) + todo.index(job) + 1, len(jobs))


def _draw(drawer: Drawer, letter: Letter, job: DrawJob, store: ProofStore, warm: set[Settings]) -> bool:
    """Draw and keep one image; return whether there is one.

    Args:
        warm: settings of the images drawn so far. The first image of each is a warm-up, whose seconds do not count.
    """
    try:
        image = drawer.draw(job.prompt, job.seed, job.settings)
    except DrawingFailed as failure:
        store.keep_failure(letter, job, failure)
        return False
    store.keep(letter, job, image if job.settings in warm else replace(image, seconds=None))
    warm.add(job.settings)
    return True


def conclude(
    prepared: Prepared,
    store: ProofStore,
    judges: Judges,
    options: Options,
    is_read: Callable[[], None] = lambda: None,
) -> Proof:
    """Compare both sides' images, and decide. Requests of an endpoint's own checks are sent now.

    Args:
        is_read: called when the judges' models are loaded.
    """
    images = StoredImages(store)
    distances = Distances()
    has_several_sizes = len(prepared.settings_by_size) > 1
    pairs = [
        compare_pair(
            job, images.image("a", job), images.image("b", job), distances, names_size=has_several_sizes
        )
        for job in main_jobs(prepared)
    ]
    own = _own_distances(prepared, images, distances)
    add_nearness(pairs, own)
    limits = add_all_scores(pairs, judges, is_read) if prepared.knows_prompts else {}
    sizes = figures_by_size(pairs)
    same = with_worst_size(same_picture(pairs), sizes)
    listed = witness_results(pairs, limits)
    listed += worse_at_a_size(pairs, limits)
    good = as_good(
        listed,
        is_same_picture=same.verdict is ProofVerdict.PROVEN,
        is_rounding=all(p.against and p.against["psnr_db"] >= ROUNDING_DB for p in pairs if p.is_complete),
        broken=broken_in_words(pairs),
        shows_something=prepared.shows_something,
    )
    endpoint = endpoint_of(prepared, prepared.b)
    request_of = request_for(endpoint)
    for pair in pairs:
        pair.request = request_of(pair)
    findings = findings_of(prepared, pairs, images, request_of)
    checks = checks_of(prepared, images, endpoint)
    reached = means([pair.against for pair in pairs if pair.against])
    fail_under = tuple(
        FailUnder(name, limit, reached.get(name)) for name, limit in (options.fail_under or {}).items()
    )
    words = _words(prepared, pairs, judges)
    return Proof(
        a=prepared.a.side.text,
        b=prepared.b.side.text,
        claims=options.claims or _default_claims(words, endpoint),
        settings=_settings(pairs),
        requested_sizes=tuple(map(str, prepared.request.sizes)),
        sizes=sizes,
        num_seeds=len({seed for _, seed in prepared.pairs}),
        num_prompts=len(prepared.prompts),
        knows_prompts=prepared.knows_prompts,
        pairs=tuple(pairs),
        own=own,
        witness_results=tuple(listed),
        checks=tuple(checks),
        findings=tuple(findings),
        failures=tuple(_failures(pairs)),
        notes=(*_notes(prepared, pairs, own, judges), *words.notes, *_resumed(prepared, store)),
        same=same,
        good=good,
        legibility=words,
        honest=honest(checks, findings),
        speed=speed(pairs, untimed(prepared), _seconds_again(prepared, store, options), options.loads),
        fail_under=fail_under,
    )


def _settings(pairs: Sequence[PairFigures]) -> dict[str, dict[str, Any]]:
    """Return how the images of each side were drawn, where all say the same."""
    settings = {}
    for letter in ("a", "b"):
        drawn = [(pair, image) for pair in pairs if (image := getattr(pair, letter)).is_there]
        every = [
            p.settings.call if image.kept.settings is None else image.kept.settings for p, image in drawn
        ]
        first = every[0] if every else {}
        settings[letter] = {k: v for k, v in first.items() if all(each.get(k) == v for each in every)}
    return settings


def _words(prepared: Prepared, pairs: Sequence[PairFigures], judges: Judges) -> Legibility:
    if not prepared.knows_prompts:
        return NOTHING_READ
    if not prepared.shows_something:
        return left_out("images of random weights have no words")
    return legibility(pairs, judges.reader)


def _seconds_again(prepared: Prepared, store: ProofStore, options: Options) -> list[float | None] | None:
    """Return A's seconds when it was drawn again after B; None without the claim "fast"."""
    if "fast" not in options.claims:
        return None
    images = [store.image("a", job) for job in timing_jobs(prepared)]
    return [None if image is None else image.seconds for image in images]


def _resumed(prepared: Prepared, store: ProofStore) -> list[str]:
    """Return the side that was drawn by several processes after an interruption; each process has its own latency."""
    letters: tuple[Letter, ...] = ("a", "b")
    notes = []
    for letter in letters:
        images = [store.image(letter, job) for job in main_jobs(prepared)]
        number = len({image.process for image in images if image is not None and image.path is not None})
        if number > 1:
            notes.append(
                f"{letter.upper()}: its images were drawn in {number} runs, each with its own latency"
            )
    return notes


def _default_claims(words: Legibility, endpoint: Endpoint | None) -> tuple[Claim, ...]:
    claims: list[Claim] = ["as-good"]
    if words.answer.verdict is not ProofVerdict.LEFT_OUT:
        claims.append("legible")
    return (*claims, "honest") if endpoint is not None else tuple(claims)


def _own_distances(prepared: Prepared, images: StoredImages, distances: Distances) -> OwnDistances:
    jobs = main_jobs(prepared)
    repeats, others = [], []
    for job in own_jobs(prepared):
        if job.repeat:
            repeats.append((replace(job, repeat=0), job))
    by_prompt: dict[tuple[str, Settings], list[DrawJob]] = {}
    for job in (*jobs, *(job for job in own_jobs(prepared) if not job.repeat)):
        by_prompt.setdefault((job.prompt, job.settings), []).append(job)
    for same_prompt in by_prompt.values():
        others += list(itertools.pairwise(same_prompt))
    return OwnDistances(
        *(tuple(_metrics(part, images, distances)) for part in (repeats, others[: 2 * len(by_prompt)]))
    )


def _metrics(
    jobs: Sequence[tuple[DrawJob, DrawJob]], images: StoredImages, distances: Distances
) -> list[dict[str, float]]:
    """Return the metrics of A's images against other images of A."""
    pairs = [compare_pair(a, images.image("a", a), images.image("a", b), distances) for a, b in jobs]
    return [pair.against for pair in pairs if pair.against]


def _failures(pairs: Sequence[PairFigures]) -> list[Failure]:
    failures = []
    for pair in pairs:
        for side, image in (("A", pair.a), ("B", pair.b)):
            if not image.is_there:
                failures.append(
                    Failure("A" if side == "A" else "B", pair.label, image.reason, image.kept.request)
                )
        if pair.reason:
            failures.append(Failure("B", pair.label, pair.reason))
    return failures


def _notes(prepared: Prepared, pairs: Sequence[PairFigures], own: OwnDistances, judges: Judges) -> list[str]:
    notes = []
    for side in ("A", "B"):
        images = [pair.a if side == "A" else pair.b for pair in pairs]
        counted = Counter(text for image in images for text in image.notes)
        notes += [f"{side}: {text} ({number} of {len(images)})" for text, number in counted.items()]
        notes += _size_note(side, images, pairs)
        broken_images = [image for image in images if image.faults]
        if side == "A" and broken_images:
            notes.append(f"A: {len(broken_images)} broken images: {broken_images[0].faults[0]}")
    if own.repeats_exactly is False:
        notes.append("A does not draw the same image twice; B is held to no more than that")
    if not prepared.shows_something:
        notes.append("the model has random weights: its images show nothing")
    return [*notes, *judges.notes]


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


def open_store(prepared: Prepared, folder: Path, reuse: bool = False) -> ProofStore:
    """Open the folder of a comparison's images; see `ProofStore`."""
    return ProofStore(folder, prepared.identity, reuse)
