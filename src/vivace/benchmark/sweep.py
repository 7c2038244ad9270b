"""`vivace.bench`: compare recipes on one model."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from vivace.benchmark.figures import add_figures, draw_noise_floor
from vivace.benchmark.launcher import WORKER, Launcher
from vivace.benchmark.plan import Plan
from vivace.benchmark.prepare import Prepared, check_judged, default_threads, prepare
from vivace.benchmark.runner import Progress, Silent, ask_environment, ask_largest_batch, run_trials
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.errors import UnknownModel, Unsupported
from vivace.measure.lpips import check as check_lpips
from vivace.models.scorers import FoundScorer, find_scorer
from vivace.spec.record import Record
from vivace.spec.trial import Trial

USUAL_SCORER = "openai/clip-vit-large-patch14"


def bench(
    model: str,
    recipes: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    prompt_set: str | None = None,
    seed: int = 0,
    num_seeds: int | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    batch: int | Literal["max"] = 1,
    text: str = "prompts",
    plan: Plan | None = None,
    device: str = "auto",
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    quality: bool = True,
    scorer: str | None = "auto",
    lpips: bool = False,
    rivals: bool = True,
    progress: Progress | None = None,
    command: str | None = None,
    worker: Sequence[str] = WORKER,
    launcher: Launcher | None = None,
) -> list[Record]:
    """Measure recipes on a model, the first of them the baseline, and return one Record a recipe.

    What the store holds already is not measured again. Each round runs in a process of its own; one that crashes,
    hangs or runs out of memory becomes an outcome of its row and leaves the others alone.

    Args:
        model: what `vivace.load` takes; of `synthetic:NAME` no quality is computed, its pictures show nothing.
        recipes: e.g. ["baseline", "tiny_vae+steps(20)"]; recipes that mean the same are measured once.
        prompts: None for the model's own.
        prompt_set: instead, a set of thirteen prompts: "tinyworld" or "real".
        seed, num_seeds: each prompt is drawn at seed, seed + 1, ...; None for one seed, for three of a prompt set.
        batch: pictures drawn in one call, "max" for as many as fit the GPU with the baseline, in a fresh process as
            rounds are; times are a picture's share.
        text: "prompts", or "embeddings" to leave the text encoders out of the measured call.
        plan: rounds, repeats, time limits.
        quality: after all timing, compute figures of the pictures, alone and against the baseline's.
        scorer: the CLIP model that scores them: "auto" (the model's own, or the usual one if it is on this machine),
            None for none, or what `vivace.models.scorers.find_scorer` understands.
        lpips: also compute LPIPS; its weights must be there (see `vivace.measure.lpips`).
        rivals: beside each step cache also measure the same recipe with fewer plain steps instead.
        command: the command line to note beside the run; None for the equivalent `vivace bench`.
        worker: the command line that starts a worker process.
        launcher: one that is running already; None to start one.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    prepared = prepare(
        model,
        recipes,
        prompts=prompts,
        prompt_set=prompt_set,
        seed=seed,
        num_seeds=num_seeds,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        batch=1 if batch == "max" else batch,
        text=text,
        rivals=rivals,
    )
    check_judged(prepared.found, *(quality_flags(scorer, lpips) if quality else ()))
    quality = quality and not prepared.found.model.is_synthetic  # its pictures show nothing
    scores = _scorer(scorer, prepared) if quality else None
    if lpips and quality:
        check_lpips()
    plan = plan or Plan()
    if plan.threads is None:
        plan = plan.model_copy(update={"threads": default_threads(prepared.found)})
    with ExitStack() as stack:
        opened = stack.enter_context(Store.create(Path(store)))
        if launcher is None:
            launcher = stack.enter_context(start_launcher(device, worker))
        environment = ask_environment(launcher, device, plan.threads)
        trials = [
            Trial(
                model=prepared.found.model,
                recipe=recipe,
                workload=prepared.workload,
                device=environment.device,
            )
            for recipe in prepared.recipes
        ]
        if batch == "max":
            most = {"batch": ask_largest_batch(launcher, trials[0], plan)}
            workload = prepared.workload.model_copy(update=most)
            trials = [trial.model_copy(update={"workload": workload}) for trial in trials]
        line = command or _command(model, prepared)
        opened.start_run(line, trials, environment, scores.id if scores else None)
        records = run_trials(
            trials,
            environment,
            plan,
            opened,
            launcher,
            rerun=rerun,
            largest_batch=batch == "max",
            progress=progress,
        )
        if quality and records:
            start = time.perf_counter()
            num_drawn = draw_noise_floor(records[0], opened, launcher, plan.threads)
            num_scored = add_figures(
                records, opened, launcher, scores, environment.device, plan.threads, lpips
            )
            (progress or Silent()).end_quality(num_scored, num_drawn, time.perf_counter() - start)
        return records


def quality_flags(scorer: str | None, lpips: bool) -> list[str]:
    """What of the arguments asks for figures of pictures in so many words."""
    return (["--scorer"] if scorer not in (None, "auto") else []) + (["--lpips"] if lpips else [])


def _scorer(name: str | None, prepared: Prepared) -> FoundScorer | None:
    """The CLIP model asked for. `auto` never fetches one: what it finds nowhere it goes without."""
    if name is None:
        return None
    if name != "auto":
        return find_scorer(name)
    entry = prepared.found.entry
    if entry is not None and entry.scorer is not None:
        return find_scorer(entry.scorer)
    if entry is not None and prepared.found.model.source == "embedded":
        return None
    try:
        return find_scorer(USUAL_SCORER, download=False)
    except (Unsupported, UnknownModel):
        return None


def start_launcher(device: str, worker: Sequence[str] = WORKER) -> Launcher:
    """A launcher for rounds on `device` ("auto", "cpu" or "cuda")."""
    return Launcher(worker, tries_gpu=device != "cpu")


def _command(model: str, prepared: Prepared) -> str:
    parts = ["vivace", "bench", "--model", model]
    for recipe in prepared.recipes:
        parts += ["--recipe", recipe.text]
    return shlex.join(parts)
