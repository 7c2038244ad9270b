"""`vivace.prove`: the command `vivace prove` in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from vivace.benchmark.store import DEFAULT_STORE
from vivace.errors import UsageError
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.task_names import Device
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.proofs.checks.side_loads import LEAST_REQUESTS, LoadRequest, check_loads, measure_loads
from vivace.proofs.proving import OnProgress, Options, conclude, draw_side, open_store
from vivace.proofs.sides.drawing import Settings
from vivace.proofs.sides.prepare_sides import DEFAULT_NUM_PROMPTS, DrawRequest, Prepared, prepare
from vivace.proofs.verdicts.fast import untimed
from vivace.proofs.verdicts.legible import check_words_can_be_read
from vivace.proofs.verdicts.proof import METRICS, Claim, Proof
from vivace.proofs.verdicts.scoring import Judges, find_all

FOLDER = "prove"
"""Folder of images in the store."""


def prove(
    a: str,
    b: str,
    *,
    prompts: str | Sequence[str] | None = None,
    prompt_set: str | None = None,
    num_prompts: int = DEFAULT_NUM_PROMPTS,
    seed: int = 0,
    num_seeds: int = NUM_SEEDS,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    sizes: Sequence[str | tuple[int, int]] = (),
    claims: Claim | Sequence[Claim] = (),
    fail_under: Mapping[str, float] | None = None,
    scorer: str | None = "auto",
    witness: str | None = None,
    timeout_s: float = 600.0,
    key_a: str | None = None,
    key_b: str | None = None,
    num_requests: int | None = None,
    aiperf_a: str | Path | None = None,
    aiperf_b: str | Path | None = None,
    reuse: bool = False,
    device: Device = "auto",
    threads: int | None = None,
    store: str | Path = DEFAULT_STORE,
    progress: OnProgress | None = None,
) -> Proof:
    """Prove that B draws the same images as A, or as good ones, and does what it is asked for.

    Images are kept in the store: after an interruption the same call goes on. A model is read in this process,
    without the limits on time and memory that the command has.

    Args:
        a, b: MODEL:RECIPE, a folder of images, http://HOST:PORT/v1, comfyui:http://HOST:PORT?workflow=FILE or
            python:MODULE:FUNCTION. A is the reference.
        prompts: None for `num_prompts` of a prompt set.
        prompt_set: "real" or "tinyworld"; None for the one that the model understands, else "real".
        height, width, num_inference_steps, guidance_scale: of every image; None for the model's own.
        sizes: draw every prompt at each, e.g. "512x768" (width, height).
        claims: "same", "as-good", "legible", "honest" and "fast", which decide `Proof.verdict`; none for those that
            apply, without "fast".
        fail_under: limits on the means of metrics: psnr_db, ssim, match (least), lpips (most).
        scorer, witness: the models that judge images, as for `vivace.bench`.
        timeout_s: longest wait for an answer of a server.
        key_a, key_b: keys that are sent to a server.
        num_requests: also put loads of this many requests on each images endpoint.
        aiperf_a, aiperf_b: also show a run of AIPerf on a side, its --artifact-dir.
        reuse: also use the images of an earlier complete call.
        progress: called with "a" or "b", the number of its images that are done, and of all.

    Raises:
        UsageError, RecipeError, UnknownModel, UnusableModel, Unsupported, WorkloadError, StoreError: see
            `vivace.errors`. Failures of single images are in `Proof.failures`.
    """
    claims = (claims,) if isinstance(claims, str) else tuple(claims)
    _check(claims, fail_under or {}, prompt_set)
    workload = _workload(
        {"prompts": prompts, "seed": seed, "num_seeds": num_seeds, "height": height, "width": width}
        | {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
    )
    if num_requests is not None and num_requests < LEAST_REQUESTS:
        raise UsageError(f"num_requests={num_requests}: give at least {LEAST_REQUESTS}, or None for no load")
    if num_prompts < 1 or num_seeds < 1:
        raise UsageError(f"num_prompts={num_prompts}, num_seeds={num_seeds}: give at least 1 of each")
    request = DrawRequest(
        prompts=workload.prompts,
        prompt_set=prompt_set,
        num_prompts=num_prompts,
        seed=seed,
        num_seeds=num_seeds,
        settings=Settings(height, width, num_inference_steps, guidance_scale),
        sizes=_sizes(sizes),
        device=device,
        threads=threads,
        timeout_s=timeout_s,
        key_a=key_a,
        key_b=key_b,
    )
    prepared = prepare(a, b, request)
    judges = find_judges(prepared, claims, scorer, witness)
    load = LoadRequest(num_requests, *(None if path is None else Path(path) for path in (aiperf_a, aiperf_b)))
    check_loads(prepared, load)
    kept = open_store(prepared, Path(store) / FOLDER, reuse)
    on_progress = progress or (lambda side, done, total: None)
    draw_side(prepared, "a", kept, on_progress)
    draw_side(prepared, "b", kept, on_progress)
    if "fast" in claims:
        draw_side(prepared, "a", kept, on_progress, again=True)
    loads = measure_loads(prepared, kept, load)
    proof = conclude(prepared, kept, judges, Options(claims, fail_under, tuple(loads)))
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


def _check(claims: Sequence[str], fail_under: Mapping[str, float], prompt_set: str | None) -> None:
    """Raise UsageError for an unknown name, or a limit that no image reaches."""
    for kind, names, allowed in (
        ("claim", claims, get_args(Claim)),
        ("metric", tuple(fail_under), tuple(METRICS)),
        ("prompt set", () if prompt_set is None else (prompt_set,), tuple(PROMPT_SETS)),
    ):
        for name in names:
            if name not in allowed:
                raise UsageError(f"no {kind} {str(name)[:60]!r}; it is one of {', '.join(allowed)}")
    for name, limit in fail_under.items():
        low, high = METRICS[name]
        if not low <= limit <= high:
            raise UsageError(f"fail_under {name}={limit:g} is not from {low:g} to {high:g}")


def _workload(fields: Mapping[str, object]) -> WorkloadRequest:
    with InputErrors():
        return WorkloadRequest.model_validate(fields)


def _sizes(sizes: Sequence[str | tuple[int, int]]) -> tuple[Size, ...]:
    texts = [size if isinstance(size, str) else "{}x{}".format(*size) for size in sizes]
    try:
        return tuple(dict.fromkeys(Size.of(text) for text in texts))
    except ValueError as error:
        raise UsageError(f"sizes: {error}") from None
