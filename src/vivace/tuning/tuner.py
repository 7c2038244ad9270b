"""`vivace.tune`: put a search together, run it, and return its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from vivace.benchmark.places.local_pool import NumGpus
from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.runner import ask_environment
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.benchmark.studies import start_launcher
from vivace.errors import UsageError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.arguments import parse_bytes, parse_seconds
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.task_names import Device
from vivace.foundation.spec.timing import Timing
from vivace.models.find import LocatedModel, find_model, obtain
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.report.rows import priced
from vivace.runtime.workloads import default_threads, workload_of
from vivace.tuning.answer import Tuned
from vivace.tuning.budget import Budget
from vivace.tuning.by_model import ModelSampler
from vivace.tuning.explanation import explanation_of
from vivace.tuning.first_calls import FirstCalls
from vivace.tuning.image_request import ImageRequest
from vivace.tuning.judge import QualityJudge
from vivace.tuning.measurer import Unwatched, Watcher
from vivace.tuning.measuring import Bench
from vivace.tuning.notes import notes_of
from vivace.tuning.objective import Goal, Objective
from vivace.tuning.priors import PriorSource, effects, known_sources, no_record, reported
from vivace.tuning.proving_final import final_of
from vivace.tuning.readiness import check_ready
from vivace.tuning.results import Result, latest
from vivace.tuning.search import Search
from vivace.tuning.search_settings import SearchSettings
from vivace.tuning.setup import (
    budget_of,
    check_baseline,
    check_memory,
    check_of_calls,
    space_of,
    start_of,
    trusted_recipes,
)
from vivace.tuning.space import Space
from vivace.tuning.stored import history_of


def tune(
    model: str,
    *,
    goal: Goal = "latency",
    max_memory_bytes: float | str | None = None,
    max_first_call_s: float | str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    scorer: str | None = "auto",
    witness: str | None = None,
    minutes: float | None = None,
    trials: int | None = None,
    start: str | None = None,
    keep: Sequence[str] = (),
    without: Sequence[str] = (),
    trust_quality_of: str | None = None,
    request: ImageRequest | None = None,
    store: str | Path = DEFAULT_STORE,
    device: Device = "auto",
    threads: int | None = None,
    gpus: NumGpus | None = None,
    timeout_s: float = 600.0,
    price_per_hour: float | None = None,
    seed: int = 0,
    watcher: Watcher | None = None,
    progress: Progress | None = None,
    launcher: Launcher | None = None,
    command: str | None = None,
) -> Tuned:
    """Find the best recipe for a model on this machine, within limits, by measuring little.

    Measurements are kept in the store: the same call goes on where an interrupted one stopped, and a later one starts
    from its results.

    Args:
        model: what `vivace.load` takes.
        goal: see `Objective`.
        max_memory_bytes, max_first_call_s: limits on the peak memory and on the first call, in bytes and seconds, or
            with units: "12GB", "2min".
        limits: of the quality gate.
        scorer, witness: the models that judge images, as for `vivace.bench`. Without a CLIP model only techniques that
            keep the image are searched.
        minutes: the search stops in time for its final; default: 8, or no limit if `trials` is given.
        trials: recipes to measure, stored ones of the same search included.
        start: a recipe to begin with.
        keep, without: techniques that every recipe has, or none.
        trust_quality_of: for random weights: an embedded model of the same kind. Techniques that change the image are
            searched where the store's records of that model keep the quality.
        request: size, steps and prompts; None for the model's own.
        gpus: screen and judge on this many GPUs of this host; the final runs on one.
        price_per_hour: of this machine, in any currency: the answer says what images cost.
        seed: of the search's own randomness.
        watcher, progress: observers of the search.
        launcher: a running launcher; None to start one.

    Raises:
        UsageError: options that contradict each other; the message names the limit and the nearest possible value.
        UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    run = RunSettings(store=store, progress=progress or SILENT, command=command, launcher=launcher, gpus=gpus)
    settings = SearchSettings(
        goal=goal,
        max_memory_bytes=None if max_memory_bytes is None else parse_bytes(_with_unit(max_memory_bytes, "B")),
        max_first_call_s=None
        if max_first_call_s is None
        else parse_seconds(_with_unit(max_first_call_s, "s")),
        limits=limits,
        scorer=scorer,
        witness=witness,
        minutes=minutes,
        trials=trials,
        start=start,
        keep=tuple(keep),
        without=tuple(without),
        trust_quality_of=trust_quality_of,
        request=request or ImageRequest(),
        device=device,
        timing=Timing(timeout_s=timeout_s, threads=threads),
        price_per_hour=price_per_hour,
        seed=seed,
        run=run,
    )
    return search_recipe(model, settings, watcher or Unwatched())


def _with_unit(amount: float | str, unit: str) -> str:
    return amount if isinstance(amount, str) else f"{amount:f}{unit}"


def search_recipe(model: str, settings: SearchSettings, watcher: Watcher) -> Tuned:
    """Search by settings, checked here; see `tune`."""
    check_ready(
        model,
        settings.device,
        settings.allowed_minutes,
        settings.request,
        settings.scorer,
        settings.witness,
        tell=lambda text: watcher.note(f"note: {text}"),
    )
    began = time.monotonic()
    located = find_model(model)
    trusted_model = settings.trust_quality_of
    if trusted_model is not None and not located.model.is_synthetic:
        raise UsageError(
            f"--trust-quality-of {trusted_model}: {model} has trained weights, so its own images are judged; leave it "
            "out"
        )
    judge = settings.judge(located)
    objective = settings.objective(judge)
    first = start_of(settings.start, objective)
    trusted = (
        None
        if trusted_model is None
        else trusted_recipes(trusted_model, located, settings.run.folder, settings.quality_limits)
    )
    request = settings.images(objective)
    prompts = request.prompts or PROMPT_SETS[located.prompt_set]
    workload_of(located, request.of(prompts), request.batch)  # reports sizes that the model cannot draw
    with ExitStack() as stack:
        bench = _bench(stack, model, obtain(located), settings, objective, judge, request)
        sources = known_sources(
            model, bench.environment.device_name, objective, is_cpu=bench.environment.device == "cpu"
        )
        space = space_of(objective, bench, trusted, reported(sources))
        check_memory(objective, bench)
        history, stored = history_of(bench)
        watcher.note(
            f"{len(space.options)} options, {len(space.cut)} left out{_stored_summary(history, stored)}"
        )
        for note in judge.notes(bench.command):
            watcher.note(f"note: {note}")
        if (unknown := no_record(bench.environment.device_name, bench.environment.device)) is not None:
            watcher.note(f"note: {unknown}")
        watcher.note("measuring the baseline")
        base = _measured_baseline(bench, settings.minutes, began)
        bench.time.spend(settings.allowed_minutes, began)
        budget = budget_of(settings.minutes, settings.trials, bench, began)
        sources = (stored, *sources)
        search = Search(
            objective,
            space,
            _sampler(settings, bench, space, sources, base, budget, first),
            bench,
            budget,
            judges=bench.judges,
            watcher=watcher,
            history=[*history, base],
        )
        pick = search.run()
        answer = _answer(search, bench, pick, sources, time.monotonic() - began, trusted_model)
        return replace(answer, rows=tuple(priced(answer.rows, settings.price_per_hour)))


def _bench(
    stack: ExitStack,
    model: str,
    located: LocatedModel,
    settings: SearchSettings,
    objective: Objective,
    judge: QualityJudge,
    request: ImageRequest,
) -> Bench:
    """Return the measurer, with a launcher that ends with the stack."""
    run = settings.run
    stack.enter_context(Store.create(run.folder)).close()
    launcher = run.launcher or stack.enter_context(start_launcher(settings.device))
    threads = settings.timing.threads or default_threads(located)
    return Bench(
        model=model,
        located=located,
        objective=objective,
        request=request,
        prompts=tuple(request.prompts or PROMPT_SETS[located.prompt_set]),
        judges=judge.compares,
        judged_by=judge,
        run=replace(run, launcher=launcher, command=run.command or f"vivace tune {model}"),
        environment=ask_environment(launcher, settings.device, threads),
        device=settings.device,
        timing=settings.timing.model_copy(update={"threads": threads}),
    )


def _measured_baseline(bench: Bench, minutes: float | None, began: float) -> Result:
    """Measure the baseline; its first calls show whether the minutes can suffice."""
    run = bench.run
    bench.run = replace(run, progress=FirstCalls(run.progress, check_of_calls(minutes, bench, began)))
    base = bench.start()
    bench.run = run
    check_baseline(base, bench)
    assert base is not None
    return base


def _sampler(
    settings: SearchSettings,
    bench: Bench,
    space: Space,
    sources: Sequence[PriorSource],
    base: Result,
    budget: Budget,
    start: Recipe | None,
) -> ModelSampler:
    return ModelSampler(
        space,
        np.random.default_rng(settings.seed),
        tuple(source for source in sources if source.data),
        effects(
            space.options,
            dict(base.stages_s),
            bench.objective,
            bench.full.num_inference_steps,
            is_cpu=bench.environment.device == "cpu",
        ),
        start=start,
        seconds_of=None if math.isinf(budget.most_s) else bench.time.seconds_of_trial,
        most_s=lambda: budget.most_s,
        peaks=bench.peaks.predicted,
    )


def _stored_summary(history: Sequence[Result], stored: PriorSource) -> str:
    """Describe the store's content: results of the same search, and figures to learn from."""
    number = len({result.recipe for result in history if not result.recipe.is_baseline})
    others = len({datum.recipe for datum in stored.data})
    parts = []
    if number:
        parts.append(
            f"the store has {number} recipe{'' if number == 1 else 's'} of this search, which goes on"
        )
    if others:
        parts.append(f"it learns from {others} that were measured otherwise")
    return "".join(f"; {part}" for part in parts)


def _answer(
    search: Search,
    bench: Bench,
    pick: Result | None,
    sources: Sequence[PriorSource],
    spent_s: float,
    trusted: str | None,
) -> Tuned:
    objective = search.objective
    return Tuned(
        model=bench.model,
        device_name=bench.environment.device_name,
        objective=objective,
        pick=pick,
        rows=final_of(bench, pick),
        history=tuple(latest(search.history).values()),
        cut=dict(search.space.cut),
        notes=tuple(notes_of(search, bench, pick, trusted)),
        store=bench.run.folder,
        judges=bench.judges,
        num_trials=search.num_trials,
        seconds=spent_s,
        trusted=trusted,
        options=bench.request.options,
        task=bench.task,
        explanation=explanation_of(search, sources),
        expected=expected_neighbours(search, pick),
        command=bench.command,
    )


def expected_neighbours(search: Search, pick: Result | None) -> dict[str, float]:
    """Return the expected gain of the pick with one technique less: its own, and that technique's posterior."""
    if pick is None:
        return {}
    less = [pick.recipe.without(technique) for technique in pick.recipe]
    gains = search.sampler.expected_gains([pick.recipe, *less], search.history)
    return {
        recipe.text: (pick.gain or 0.0) + gain - gains[0][0]
        for recipe, (gain, _) in zip(less, gains[1:], strict=True)
    }
