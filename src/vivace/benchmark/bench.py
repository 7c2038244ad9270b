"""`vivace.bench`: compare recipes on one model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vivace.benchmark.launcher import WORKER, Launcher
from vivace.benchmark.plan import Plan
from vivace.benchmark.runner import Progress, ask_environment, run_trials
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.errors import UsageError, WorkloadError
from vivace.models.find import Found, find_model
from vivace.spec.recipe import Recipe
from vivace.spec.record import Record
from vivace.spec.trial import Trial
from vivace.spec.workload import MAX_PIXEL_STEPS, Workload
from vivace.techniques.resolve import resolve

# For models that bring no prompts of their own.
DEFAULT_PROMPTS = ("a red circle above a blue square", "a lighthouse at dusk", "a bowl of oranges on a table")


@dataclass(frozen=True)
class Prepared:
    """A checked question: model, recipes and workload exist and fit; nothing has been started."""

    found: Found
    recipes: tuple[Recipe, ...]
    workload: Workload


def prepare(
    model: str,
    recipes: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    seed: int = 0,
    num_seeds: int = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
) -> Prepared:
    """Check everything that can be checked before a process starts.

    Raises:
        UnknownModel, RecipeError, WorkloadError: see `vivace.errors`.
    """
    if not recipes:
        raise UsageError(
            "no recipe given; the first --recipe is the baseline that the others are compared with"
        )
    resolved: dict[str, Recipe] = {}
    for text in recipes:
        recipe = resolve(text)
        resolved.setdefault(recipe.text, recipe)
    found = find_model(model)
    entry = found.entry
    chosen = tuple(prompts) if prompts is not None else (entry.prompts if entry else DEFAULT_PROMPTS)
    if not chosen:
        raise WorkloadError("the list of prompts is empty; give at least one prompt")
    if num_seeds < 1:
        raise WorkloadError(f"--seeds {num_seeds}: at least one seed a prompt is wanted")
    numbers = {
        "height": height if height is not None else (entry.height if entry else 512),
        "width": width if width is not None else (entry.width if entry else 512),
        "num_inference_steps": num_inference_steps
        if num_inference_steps is not None
        else (entry.num_inference_steps if entry else 30),
        "guidance_scale": guidance_scale
        if guidance_scale is not None
        else (entry.guidance_scale if entry else 7.5),
    }
    try:
        workload = Workload(prompts=chosen, seeds=tuple(range(seed, seed + num_seeds)), **numbers)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + "-".join(str(part) for part in problem["loc"][:1]).replace("_", "-")
        raise WorkloadError(f"{flag} {problem.get('input')!r}: {problem['msg']}") from None
    check_size(found, workload)
    return Prepared(found, tuple(resolved.values()), workload)


def check_size(found: Found, workload: Workload) -> None:
    """Refuse sizes that the model cannot draw.

    Raises:
        WorkloadError: with the nearest size that it can draw.
    """
    multiple = found.entry.size_multiple if found.entry else 8
    largest = found.entry.max_size if found.entry else 8192
    for flag, size in (("--height", workload.height), ("--width", workload.width)):
        nearest_size = min(max(round(size / multiple) * multiple, multiple), largest)
        if size != nearest_size:
            raise WorkloadError(
                f"{flag} {size}: {found.model.name} draws multiples of {multiple} up to {largest} pixels; "
                f"the nearest is {nearest_size}"
            )
    if workload.pixel_steps > MAX_PIXEL_STEPS:
        raise WorkloadError(
            f"{workload.num_pictures} pictures of {workload.width}x{workload.height} at "
            f"{workload.num_inference_steps} steps are {workload.pixel_steps:.1e} pixel steps, more than "
            f"{MAX_PIXEL_STEPS:.0e}; give fewer or smaller pictures"
        )


def default_threads(found: Found) -> int:
    """CPU threads to draw with: the catalogue's, or as many as there are physical cores. Fixed, since it shows in
    the last bits of a picture."""
    if found.entry is not None:
        return found.entry.threads
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def bench(
    model: str,
    recipes: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    seed: int = 0,
    num_seeds: int = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    worker: Sequence[str] = WORKER,
    launcher: Launcher | None = None,
) -> list[Record]:
    """Measure recipes on a model, the first of them the baseline, and return one Record a recipe.

    What the store holds already is not measured again. Each round runs in a process of its own; one that crashes,
    hangs or runs out of memory becomes an outcome of its row and leaves the others alone.

    Args:
        model: a catalogue name or a folder.
        recipes: e.g. ["baseline", "tiny_vae+steps(20)"]; recipes that mean the same are measured once.
        prompts: None for the model's own.
        seed, num_seeds: each prompt is drawn at seed, seed + 1, ...
        plan: rounds, repeats, time limits.
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
        seed=seed,
        num_seeds=num_seeds,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
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
        opened.start_run(command or _command(model, prepared), trials, environment)
        return run_trials(trials, environment, plan, opened, launcher, rerun=rerun, progress=progress)


def start_launcher(device: str, worker: Sequence[str] = WORKER) -> Launcher:
    """A launcher that forks where rounds will run on the CPU, and starts afresh where they may touch CUDA."""
    return Launcher(fork=device == "cpu" or (device == "auto" and not _has_nvidia_driver()), command=worker)


def _has_nvidia_driver() -> bool:
    """Asked without torch, which this process does not import. A driver that torch cannot use costs only time:
    each round then starts a process of its own."""
    return (
        os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        and Path("/proc/driver/nvidia/version").exists()
    )


def _command(model: str, prepared: Prepared) -> str:
    parts = ["vivace", "bench", "--model", model]
    for recipe in prepared.recipes:
        parts += ["--recipe", recipe.text]
    return shlex.join(parts)
