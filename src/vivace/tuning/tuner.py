"""`vivace.tune`: put a search together, run it, and return its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vivace.benchmark import QualityRequest
from vivace.benchmark.comparison import default_threads, workload_of
from vivace.benchmark.places.local_pool import NumGpus
from vivace.benchmark.runner import Progress, Silent, ask_environment
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.benchmark.studies import start_launcher
from vivace.errors import UsageError
from vivace.models.find import find_model, obtain
from vivace.models.prompts import PROMPT_SETS
from vivace.processes.launcher import Launcher
from vivace.report.rows import priced
from vivace.spec.limits import DEFAULT_LIMITS, Limits
from vivace.techniques import TECHNIQUES
from vivace.tuning.answer import Tuned
from vivace.tuning.budget import Trials
from vivace.tuning.by_model import ModelSampler
from vivace.tuning.explanation import explanation_of
from vivace.tuning.first_calls import FirstCalls
from vivace.tuning.image_request import ImageRequest
from vivace.tuning.judge import judge_of
from vivace.tuning.measurer import Unwatched, Watcher
from vivace.tuning.measuring import Bench
from vivace.tuning.notes import notes_of
from vivace.tuning.objective import Goal, Objective
from vivace.tuning.priors import PriorSource, effects, known_sources, reported
from vivace.tuning.proof import final_of
from vivace.tuning.readiness import check_ready
from vivace.tuning.results import Result, latest
from vivace.tuning.samplers import Name, sampler_of
from vivace.tuning.search import Search
from vivace.tuning.setup import (
    DEFAULT_MINUTES,
    budget_of,
    check_baseline,
    check_memory,
    check_of_calls,
    space_of,
    start_of,
    trusted_recipes,
)
from vivace.tuning.stored import history_of

_BATCHES = {"latency": 1, "memory": 1, "throughput": 4, "cost": 4}


def tune(
    model: str,
    *,
    goal: Goal = "latency",
    max_memory_bytes: float | None = None,
    max_first_call_s: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    scorer: str | None = "auto",
    witness: str | None = None,
    minutes: float | None = None,
    trials: int | None = None,
    start: str | None = None,
    keep: Sequence[str] = (),
    without: Sequence[str] = (),
    sampler: Name = "model",
    trust_quality_of: str | None = None,
    request: ImageRequest | None = None,
    store: str | Path = DEFAULT_STORE,
    device: str = "auto",
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

    What has been measured is kept in the store: the same call goes on where an interrupted one stopped, and a second
    one starts from all that is known.

    Args:
        model: what `vivace.load` takes.
        goal: see `Objective`.
        max_memory_bytes, max_first_call_s: limits on the peak memory and on the first call.
        limits: of the quality gate.
        scorer, witness: the models that judge images, as for `vivace.bench`. Without a CLIP model only techniques that
            keep the image are searched.
        minutes: the search stops in time for its final; default: 8, or no limit if `trials` is given.
        trials: recipes to measure, stored ones of the same search included.
        start: a recipe to begin with.
        keep, without: techniques that every recipe has, or none.
        sampler: "model" (the default), "tpe" (Optuna's) or "random".
        trust_quality_of: for random weights: an embedded model of the same kind. Techniques that change the image are
            searched where the store has seen them keep that model's quality.
        request: size, steps and prompts; None for the model's own.
        gpus: screen and judge on so many GPUs of this host; the final runs on one.
        price_per_hour: of this machine, in any currency: the answer says what images cost.
        seed: of the search's own randomness.
        watcher, progress: are told what happens.
        launcher: a running launcher; None to start one.

    Raises:
        UsageError: options that contradict each other; the message names the limit and what is nearest.
        UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    request, watching = request or ImageRequest(), watcher or Unwatched()
    spent = DEFAULT_MINUTES if minutes is None and trials is None else minutes
    check_ready(
        model, device, spent, request, scorer, witness, tell=lambda text: watching.note(f"note: {text}")
    )
    began = time.monotonic()
    located = find_model(model)
    is_synthetic = located.model.is_synthetic
    if trust_quality_of is not None and not is_synthetic:
        raise UsageError(
            f"--trust-quality-of {trust_quality_of}: the quality of {model} is judged itself; leave it out"
        )
    judge = judge_of(
        located,
        QualityRequest(scorer=scorer, witness=witness),
        limits,
        trusts=trust_quality_of is not None,
        shows_nothing=request.has_random_controlnet,
    )
    objective = Objective(
        goal,
        max_memory_bytes,
        max_first_call_s,
        judge.limits,
        tuple(keep),
        tuple(without),
        same_picture_only=judge.same_picture_only,
    )
    first = start_of(start, objective)
    trusted = (
        None if trust_quality_of is None else trusted_recipes(trust_quality_of, located, Path(store), limits)
    )
    if request.batch == 1:
        request = replace(request, batch=_BATCHES[goal])
    if any(TECHNIQUES[name].needs_repeated_prompts for name in objective.kept_names):
        request = replace(request, text="repeated")
    prompts = request.prompts or PROMPT_SETS[located.prompt_set]
    workload_of(located, request.of(prompts), request.batch)  # reports sizes that the model cannot draw
    obtained = obtain(located)
    with ExitStack() as stack:
        stack.enter_context(Store.create(Path(store))).close()
        if launcher is None:
            launcher = stack.enter_context(start_launcher(device))
        number = threads or default_threads(obtained)
        bench = Bench(
            model=model,
            located=obtained,
            objective=objective,
            request=request,
            prompts=tuple(prompts),
            judges=judge.compares,
            judged_by=judge,
            store=Path(store),
            launcher=launcher,
            environment=ask_environment(launcher, device, number),
            device=device,
            threads=number,
            progress=progress or Silent(),
            command=command or f"vivace tune {model}",
            gpus=gpus,
            timeout_s=timeout_s,
        )
        sources_ = known_sources(
            model, bench.environment.device_name, objective, is_cpu=bench.environment.device == "cpu"
        )
        space = space_of(objective, bench, trusted, reported(sources_))
        check_memory(objective, bench)
        history, stored = history_of(bench)
        watching.note(f"{len(space.options)} options, {len(space.cut)} left out{_known_of(history, stored)}")
        for note in judge.notes(bench.command):
            watching.note(f"note: {note}")
        watching.note("measuring the baseline")
        inner = bench.progress
        bench.progress = FirstCalls(inner, check_of_calls(minutes, bench, began))
        base = bench.start()
        bench.progress = inner
        check_baseline(base, bench)
        bench.time.spend(spent, began)
        budget = budget_of(minutes, trials, bench, began)
        sources = (stored, *sources_)
        assert base is not None
        chosen = sampler_of(
            sampler,
            space,
            sources=[source for source in sources if source.data],
            effects=effects(
                space.options,
                dict(base.stages_s),
                objective,
                bench.full.num_inference_steps,
                is_cpu=bench.environment.device == "cpu",
            ),
            start=first,
            seconds_of=None if isinstance(budget, Trials) else bench.time.seconds_of_trial,
            most_s=lambda: getattr(budget, "most_s", math.inf),
            peaks=bench.peaks.predicted,
            seed=seed,
        )
        search = Search(
            objective,
            space,
            chosen,
            bench,
            budget,
            judges=bench.judges,
            watcher=watching,
            history=[*history, base],
        )
        pick = search.run()
        answer = _answer(search, bench, pick, chosen, sources, time.monotonic() - began, trust_quality_of)
        return replace(answer, rows=tuple(priced(answer.rows, price_per_hour)))


def _known_of(history: Sequence[Result], stored: PriorSource) -> str:
    """Describe what the store has: results of the same search, which count, and figures to learn from."""
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
    sampler: object,
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
        store=bench.store,
        judges=bench.judges,
        num_trials=search.num_trials,
        seconds=spent_s,
        trusted=trusted,
        options=bench.request.options,
        task=bench.task,
        explanation=explanation_of(sampler, search, sources),
        expected=_expected(sampler, search, pick),
        command=bench.command,
    )


def _expected(sampler: object, search: Search, pick: Result | None) -> dict[str, float]:
    """Return the gain that is expected of the pick with one technique less: its own, and what is believed of it."""
    if pick is None or not isinstance(sampler, ModelSampler):
        return {}
    sampler.learn(search.history)
    less = [pick.recipe.without(technique) for technique in pick.recipe]
    mean, _ = sampler.gain.estimate([pick.recipe, *less])
    return {
        recipe.text: (pick.gain or 0.0) + float(gain - mean[0])
        for recipe, gain in zip(less, mean[1:], strict=True)
    }
