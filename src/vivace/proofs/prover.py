"""`vivace.prove`: the command `vivace prove` in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SkipValidation, WrapValidator

from vivace.errors import UsageError
from vivace.foundation.spec.settings import DEFAULT_STORE, Option, Scorer, Store, Witness, as_list, takes
from vivace.proofs.checks.side_loads import LoadRequest, check_loads, measure_loads
from vivace.proofs.sides.jobs import jobs_of, timing_jobs
from vivace.proofs.sides.plan import DrawRequest, ProofPlan, prepare
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.side import DrawingFailure, ImageSettings, OnNote
from vivace.proofs.verdicts.conclude import Options, conclude
from vivace.proofs.verdicts.legible import check_words_can_be_read
from vivace.proofs.verdicts.proof import METRICS, Claim, Proof
from vivace.proofs.verdicts.scoring import Judges, find_all

OnProgress = Callable[[Letter, int, int], None]
"""Called with the side, the number of its finished images, and the number of all."""
_MOST_IN_A_ROW = 5
"""Consecutive failures after which a side is not asked for the rest."""
FOLDER = "prove"
"""Folder of images in the store."""


def _limits(limits: str | Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Return the limits of "psnr_db=30,ssim=0.9", or check those of a mapping.

    Raises:
        ValueError: a name or value that a limit cannot have.
    """
    if limits is None:
        return None
    if isinstance(limits, str):
        limits = dict(_limit(part.strip()) for part in limits.split(","))
    if not isinstance(limits, Mapping):
        raise ValueError("must be a dictionary")
    for name, limit in limits.items():
        if name not in METRICS:
            raise ValueError(f"{name!r} is not NAME=VALUE; NAME is one of {', '.join(METRICS)}")
        low, high = METRICS[name]
        if not low <= limit <= high:
            raise ValueError(f"{name}={limit:g} is not from {low:g} to {high:g}")
    return limits


def _limit(text: str) -> tuple[str, float]:
    name, _, number = (part.strip() for part in text.partition("="))
    if name not in METRICS:
        raise ValueError(f"{text!r} is not NAME=VALUE; NAME is one of {', '.join(METRICS)}")
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(f"{number!r} for {name} is not a number") from None


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
    plan = prepare(a, b, settings)
    judges = find_judges(plan, settings.claims, settings.scorer, settings.witness)
    check_loads(plan, settings)
    kept = ProofStore(settings.store / FOLDER, plan.identity, settings.reuse)
    on_progress = settings.progress or (lambda side, done, total: None)
    for letter, again in passes(settings.claims):
        draw_side(plan, letter, kept, on_progress, again=again)
    loads = measure_loads(plan, kept, settings)
    proof = conclude(plan, kept, judges, Options(tuple(settings.claims), settings.fail_under, tuple(loads)))
    kept.end()
    return proof


def passes(claims: Sequence[Claim]) -> list[tuple[Letter, bool]]:
    """Return the order in which the sides are drawn: A, B, and for its latency A once more."""
    once: list[tuple[Letter, bool]] = [("a", False), ("b", False)]
    return [*once, ("a", True)] if "fast" in claims else once


def draw_side(
    plan: ProofPlan,
    letter: Letter,
    store: ProofStore,
    on_progress: OnProgress = lambda letter, done, total: None,
    is_read: Callable[[], None] = lambda: None,
    on_note: OnNote = lambda text: None,
    *,
    again: bool = False,
) -> None:
    """Draw the missing images of a side. An image that cannot be drawn is kept with its reason.

    Args:
        again: draw A's images once more, for their seconds.
    """
    jobs = timing_jobs(plan) if again else jobs_of(plan, letter)
    todo = [job for job in jobs if not store.is_drawn(letter, job)]
    if not todo:
        return
    in_a_row = 0
    warm: set[ImageSettings] = set()  # the first image of each is a warm-up, whose seconds do not count
    with plan.side(letter).open(plan, is_read, on_note) as draw:
        for number, job in enumerate(todo, len(jobs) - len(todo) + 1):
            try:
                if in_a_row >= _MOST_IN_A_ROW:
                    raise DrawingFailure(f"not asked for, after {in_a_row} failures in a row")
                image = draw(job)
            except DrawingFailure as failure:
                store.keep_failure(letter, job, failure)
                in_a_row = min(in_a_row + 1, _MOST_IN_A_ROW)
            else:
                store.keep(letter, job, image if job.settings in warm else replace(image, seconds=None))
                warm.add(job.settings)
                in_a_row = 0
            on_progress(letter, number, len(jobs))


def find_judges(plan: ProofPlan, claims: Sequence[Claim], scorer: str | None, witness: str | None) -> Judges:
    """Return the judges of the images.

    Raises:
        UsageError, Unsupported, UnknownModel: a claim lacks something that it needs.
    """
    judges = find_all(plan, scorer, witness)
    if "legible" in claims:
        check_words_can_be_read(plan.prompts if plan.knows_prompts else (), judges.reader)
    if "fast" in claims and (reason := plan.a.untimed or plan.b.untimed):
        raise UsageError(f"--claim fast: {reason}")
    return judges
