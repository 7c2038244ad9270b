"""Run studies: `vivace.bench` and `run_study`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from vivace.benchmark.work import add_work
from vivace.errors import UnknownModel, Unsupported, UsageError
from vivace.models.scorers import FoundScorer, find_scorer, find_witness
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
    **fields: Any,
) -> Run:
    """Compare recipes on a model and return the run.

    Rounds that the store already holds are not measured again. Each round runs in a separate process. A round that
    crashes, hangs or runs out of memory gets that outcome and does not affect the others.

    Args:
        model: what `vivace.load` takes, or a list of it.
        recipes: e.g. ["baseline", "tiny_vae+steps(20)"]; the first is the baseline.
        store: the folder of the store; created if there is none.
        rerun: measure stored rounds again.
        progress: receives events while rounds run.
        launcher: a running launcher; None to start one.
        fields: the fields of `Study`, `AskedWorkload` and `AskedQuality` (vivace.spec.study), e.g. `prompts=[...]`,
            `num_inference_steps=20`, `timing=Timing(rounds=3)`, `quality=False`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    study = Study.of(model, recipes, **fields)
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
    """Run a study and return its result. For the other arguments see `bench`.

    Args:
        command: the command line to store with the run; None for the equivalent `vivace bench`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    checked = comparisons(study)
    scorers = [_find_scorers(study, comparison) for comparison in checked]
    with ExitStack() as stack:
        opened = stack.enter_context(Store.create(Path(store)))
        if launcher is None:
            launcher = stack.enter_context(start_launcher(study.device))
        compared = [
            _compare(
                study,
                comparison,
                scorer,
                opened,
                launcher,
                command=command or _bench_command(comparison),
                rerun=rerun,
                progress=progress or Silent(),
            )
            for comparison, scorer in zip(checked, scorers, strict=True)
        ]
    return Run(study, Path(store), tuple(compared))


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
    """Run one comparison: the largest batch if it is wanted, all rounds, then the quality pass."""
    timing = study.timing
    if timing.threads is None:
        timing = timing.model_copy(update={"threads": default_threads(comparison.found)})
    environment = ask_environment(launcher, study.device, timing.threads)
    texts = [recipe.text for recipe in comparison.recipes]
    trials = [
        Trial(
            model=comparison.found.model,
            recipe=recipe.spec,
            workload=comparison.workload,
            device=environment.device,
            repetition=texts[:index].count(recipe.text),
        )
        for index, recipe in enumerate(comparison.recipes)
    ]
    if comparison.largest_batch:
        batch = ask_largest_batch(launcher, trials[0], timing)
        trials = [with_batch(trial, batch) for trial in trials]
    invocation = store.start_run(command, trials, environment, scorer.id if scorer else None, timing.rounds)
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
    records = add_work(records, store, launcher)
    if comparison.judged and records:
        start = time.perf_counter()
        num_drawn = draw_noise_floor(records[0], store, launcher, timing.threads)
        num_scored = add_figures(
            records, store, launcher, scorer, environment.device, timing.threads, study.quality.lpips
        )
        progress.end_quality(num_scored, num_drawn, time.perf_counter() - start)
    return Compared(tuple(records), store.quality_pass(invocation))


def start_launcher(device: str, worker: Sequence[str] = WORKER) -> Launcher:
    """Return a launcher for rounds on `device` ("auto", "cpu" or "cuda").

    Args:
        worker: the command line that starts a worker process.
    """
    return Launcher(worker, tries_gpu=device != "cpu")


def _find_scorer(study: Study, comparison: Comparison) -> FoundScorer | None:
    """Return the CLIP model to score a comparison's images with; None for no scores.

    With "auto", a scorer other than the model's own is used only if it is on this machine: it is never downloaded.
    """
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


def _find_scorers(study: Study, comparison: Comparison) -> FoundScorer | None:
    """Return the CLIP model with the second witness, if one is asked."""
    scorer, witness = _find_scorer(study, comparison), study.quality.witness
    if witness is None or not comparison.judged:
        return scorer
    if scorer is None:
        raise UsageError(f"--witness {witness}: it is a second model beside CLIP; add --scorer NAME")
    return replace(scorer, witness=find_witness(witness))


def _bench_command(comparison: Comparison) -> str:
    """Return the `vivace bench` command line of a comparison's model and recipes."""
    parts = ["vivace", "bench", "--model", comparison.found.model.name]
    for recipe in comparison.recipes:
        parts += ["--recipe", recipe.text]
    return shlex.join(parts)
