"""`vivace.prove`: the command `vivace prove` in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SkipValidation, WrapValidator

from vivace.errors import UsageError
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    Option,
    Scorer,
    Store,
    Witness,
    as_list,
    takes,
)
from vivace.proofs.fast import untimed
from vivace.proofs.legible import check_words_can_be_read
from vivace.proofs.prepare_sides import DrawRequest, Prepared, prepare
from vivace.proofs.proof import METRICS, Claim, Proof
from vivace.proofs.proving import OnProgress, Options, conclude, draw_side, open_store
from vivace.proofs.scoring import Judges, find_all
from vivace.proofs.side_loads import LoadRequest, check_loads, measure_loads

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
    prepared = prepare(a, b, settings)
    judges = find_judges(prepared, settings.claims, settings.scorer, settings.witness)
    check_loads(prepared, settings)
    kept = open_store(prepared, settings.store / FOLDER, settings.reuse)
    on_progress = settings.progress or (lambda side, done, total: None)
    draw_side(prepared, "a", kept, on_progress)
    draw_side(prepared, "b", kept, on_progress)
    if "fast" in settings.claims:
        draw_side(prepared, "a", kept, on_progress, again=True)
    loads = measure_loads(prepared, kept, settings)
    proof = conclude(
        prepared, kept, judges, Options(tuple(settings.claims), settings.fail_under, tuple(loads))
    )
    kept.end()
    return proof


def find_judges(
    prepared: Prepared, claims: Sequence[Claim], scorer: str | None, witness: str | None
) -> Judges:
    """Return the judges of the images.

    Raises:
        UsageError, Unsupported, UnknownModel: a claim lacks something that it needs.
    """
    judges = find_all(prepared, scorer, witness)
    if "legible" in claims:
        check_words_can_be_read(prepared.prompts if prepared.knows_prompts else (), judges.reader)
    if "fast" in claims and (reason := untimed(prepared)) is not None:
        raise UsageError(f"--claim fast: {reason}")
    return judges
