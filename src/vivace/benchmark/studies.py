"""`vivace.bench`: compare recipes on models."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vivace.benchmark.comparison import Comparison, comparisons, default_threads
from vivace.benchmark.figures import add_figures, draw_noise_floor
from vivace.benchmark.launcher import WORKER, Launcher
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.runner import (
    Progress,
    Silent,
    ask_environment,
    ask_largest_batch,
    run_trials,
    with_batch,
)
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.errors import UnknownModel, Unsupported
from vivace.models.scorers import FoundScorer, find_scorer
from vivace.spec.study import Study
from vivace.spec.trial import Trial

USUAL_SCORER = "openai/clip-vit-large-patch14"


def bench(
    model: str | Sequence[str],
    recipes: Sequence[str],
    *,
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    launcher: Launcher | None = None,
    **asked: Any,
) -> Run:
    """Measure recipes on a model, the first of them the baseline.

    What the store holds already is not measured again. Each round runs in a process of its own; one that crashes,
    hangs or runs out of memory becomes an outcome of its row and leaves the others alone.

    Args:
        model: what `vivace.load` takes, or several.
        recipes: e.g. ["baseline", "tiny_vae+steps(20)"].
        rerun: measure again what is in the store.
        progress: told of rounds as they run.
        launcher: one that is running already; None to start one.
        asked: the fields of `Study`, `AskedWorkload` and `AskedQuality` (vivace.spec.study), e.g. `prompts=[...]`,
            `num_inference_steps=20`, `timing=Timing(rounds=3)`, `quality=False`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    study = Study.of(model, recipes, **asked)
    return run_study(study, store=store, rerun=rerun, progress=progress, launcher=launcher)


def run_study(
    study: Study,
    *,
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
) -> Run:
    """Measure a study.

    Args:
        command: the command line to note beside the run; None for the equivalent `vivace bench`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    checked = comparisons(study)
    scorers = [_scorer(study, comparison) for comparison in checked]
    with ExitStack() as stack:
        opened = stack.enter_context(Store.create(Path(store)))
        if launcher is None:
            launcher = stack.enter_context(start_launcher(study.device))
        found = [
            _compare(
                study,
                comparison,
                scorer,
                opened,
                launcher,
                command=command or _command(comparison),
                rerun=rerun,
                progress=progress or Silent(),
            )
            for comparison, scorer in zip(checked, scorers, strict=True)
        ]
    return Run(study, Path(store), tuple(found))


def _compare(
    study: Study,
    comparison: Comparison,
    scorer: FoundScorer | None,
    store: Store,
    launcher: Launcher,
    *,
    command: str,
    rerun: bool,
    progress: Progress,
) -> Compared:
    timing = study.timing
    if timing.threads is None:
        timing = timing.model_copy(update={"threads": default_threads(comparison.found)})
    environment = ask_environment(launcher, study.device, timing.threads)
    trials = [
        Trial(
            model=comparison.found.model,
            recipe=recipe.spec,
            workload=comparison.workload,
            device=environment.device,
        )
        for recipe in comparison.recipes
    ]
    if comparison.largest_batch:
        batch = ask_largest_batch(launcher, trials[0], timing)
        trials = [with_batch(trial, batch) for trial in trials]
    invocation = store.start_run(command, trials, environment, scorer.id if scorer else None)
    records = run_trials(
        trials,
        environment,
        timing,
        store,
        launcher,
        rerun=rerun,
        largest_batch=comparison.largest_batch,
        progress=progress,
    )
    if comparison.judged and records:
        start = time.perf_counter()
        num_drawn = draw_noise_floor(records[0], store, launcher, timing.threads)
        num_scored = add_figures(
            records, store, launcher, scorer, environment.device, timing.threads, study.quality.lpips
        )
        progress.end_quality(num_scored, num_drawn, time.perf_counter() - start)
    return Compared(tuple(records), store.quality_pass(invocation))


def start_launcher(device: str, worker: Sequence[str] = WORKER) -> Launcher:
    """A launcher for rounds on `device` ("auto", "cpu" or "cuda").

    Args:
        worker: the command line that starts a worker process.
    """
    return Launcher(worker, tries_gpu=device != "cpu")


def _scorer(study: Study, comparison: Comparison) -> FoundScorer | None:
    """The CLIP model asked for. `auto` never downloads one: without one there are no scores."""
    name = study.quality.scorer
    if name is None or not comparison.judged:
        return None
    if name != "auto":
        return find_scorer(name)
    entry = comparison.found.entry
    if entry is not None and entry.scorer is not None:
        return find_scorer(entry.scorer)
    if entry is not None and comparison.found.model.source == "embedded":
        return None
    try:
        return find_scorer(USUAL_SCORER, download=False)
    except (Unsupported, UnknownModel):
        return None


def _command(comparison: Comparison) -> str:
    parts = ["vivace", "bench", "--model", comparison.found.model.name]
    for recipe in comparison.recipes:
        parts += ["--recipe", recipe.text]
    return shlex.join(parts)
