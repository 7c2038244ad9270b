"""`vivace.prove`: the command `vivace prove` in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from vivace.proofs.sides.jobs import jobs_of, timing_jobs
from vivace.proofs.sides.plan import DEFAULT_NUM_PROMPTS, DrawRequest, ProofPlan, prepare
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.side import DrawingFailed, OnNote, Settings
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
    with InputErrors():
        workload = WorkloadRequest.model_validate(
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
    plan = prepare(a, b, request)
    judges = find_judges(plan, claims, scorer, witness)
    load = LoadRequest(num_requests, *(None if path is None else Path(path) for path in (aiperf_a, aiperf_b)))
    check_loads(plan, load)
    kept = ProofStore(Path(store) / FOLDER, plan.identity, reuse)
    on_progress = progress or (lambda side, done, total: None)
    for letter, again in passes(claims):
        draw_side(plan, letter, kept, on_progress, again=again)
    loads = measure_loads(plan, kept, load)
    proof = conclude(plan, kept, judges, Options(claims, fail_under, tuple(loads)))
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
    warm: set[Settings] = set()  # the first image of each is a warm-up, whose seconds do not count
    with plan.side(letter).open(plan, is_read, on_note) as draw:
        for number, job in enumerate(todo, len(jobs) - len(todo) + 1):
            try:
                if in_a_row >= _MOST_IN_A_ROW:
                    raise DrawingFailed(f"not asked for, after {in_a_row} failures in a row")
                image = draw(job)
            except DrawingFailed as failure:
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


def _sizes(sizes: Sequence[str | tuple[int, int]]) -> tuple[Size, ...]:
    texts = [size if isinstance(size, str) else "{}x{}".format(*size) for size in sizes]
    try:
        return tuple(dict.fromkeys(Size.of(text) for text in texts))
    except ValueError as error:
        raise UsageError(f"sizes: {error}") from None
