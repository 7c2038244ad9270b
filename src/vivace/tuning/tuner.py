"""`vivace.tune`: put a search together, run it, and return its answer."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vivace.answers.formatting import count, seconds, size
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import FewSteps, few_steps_of
from vivace.benchmark.progress import Forwarding
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.rounds.support import ask_support
from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Purpose
from vivace.benchmark.studies import start_launcher
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.settings import takes
from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.machinery.technique import Technique
from vivace.models.find import SYNTHETIC, LocatedModel, find_model, obtain
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, priced
from vivace.runtime.cache_fits import searched_caches
from vivace.runtime.workloads import default_threads, workload_of
from vivace.techniques.distilled import Distilled
from vivace.tuning.answer import Tuned
from vivace.tuning.final.judge import QualityJudge
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.peaks import recorded
from vivace.tuning.model.priors import PriorSource, effects, known_sources, measured_elsewhere, no_record
from vivace.tuning.model.regression import Datum
from vivace.tuning.readiness import check_ready
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung, Unwatched, best_of, latest
from vivace.tuning.search.search import Search
from vivace.tuning.search.space import Space, fit_targets
from vivace.tuning.search.timetable import FINAL_ROUNDS, Budget
from vivace.tuning.settings import ImageRequest, SearchSettings

_SHARE_OF_FIRST = 0.5
"""Smallest time of a later call as a share of the first, which also loads kernels and chooses algorithms."""
_OTHER_WORKLOAD, _OTHER_MACHINE = 0.1, 0.25
"""Standard errors of a stored gain as a prediction of the present one."""


def start_of(text: str | None, objective: Objective) -> Recipe | None:
    """Return the recipe to begin with, or raise UsageError."""
    if text is None:
        return None
    recipe = resolve(text).pinned()
    for technique in recipe:
        if technique.name in objective.without:
            raise UsageError(f"--start {text} has {technique.name}, which --without {technique.name} forbids")
        if not objective.allows(technique):
            raise UsageError(
                f"--start {text}: {technique.text} changes the image, and with random weights quality cannot be "
                "judged; leave it out"
            )
    if not objective.has_kept(recipe):
        raise UsageError(
            f"--start {text} lacks {', '.join(objective.keep)}, which --keep requires; add it to --start"
        )
    return recipe


def space_of(objective: Objective, bench: Bench, reported: Sequence[Technique] = ()) -> Space:
    """Return the space without unsupported techniques; for `reported` see `Space.of`. Unsupported if a technique to
    keep is among them."""
    every = Space.of(objective, reported=reported, judges=bench.judges).options
    texts = [option.text for option in every]
    support = ask_support(bench.launcher, bench.model, texts, bench.device, bench.task, bench.request.batch)
    components = support.components
    reasons = {
        fit_targets(option, components).text: why
        for option in every
        if (why := support.reasons.get(option.text))
    }
    # Combinations that records show to work on such a GPU, as fused does with CUDA graphs of SDXL's VAE.
    combined = frozenset(
        fit_targets(option, components)
        for option in every
        if option in reported and option.text in support.by_model
    )

    def why_not(technique: Technique) -> str | None:
        if technique.facts.needs_sources and bench.task != "edit":
            return "it is for edits, and these images start from none"
        if (
            technique.facts.num_gpus > 1
            and bench.environment.device == "cpu"
            and not objective.keeps(technique)
        ):
            return (
                f"processes on a CPU share the cores that one process has; --keep {technique.name} tries it"
            )
        return None if technique in combined else reasons.get(technique.text)

    space = Space.of(objective, why_not, reported, bench.judges, components)
    space.combined = combined
    for technique in objective.kept:
        if (why := space.cut.get(technique.text)) is not None:
            raise Unsupported(f"--keep {technique.text}: {why}")
    for name in objective.kept_names:
        if not any(option.name == name for option in space.options):
            why = next((why for text, why in space.cut.items() if text.startswith(name)), "it has no option")
            raise Unsupported(f"--keep {name}: {why}")
    return space


def known_few_steps(located: LocatedModel) -> tuple[FewSteps, ...]:
    """Return the published LoRAs of few steps of a model, or of the one that random weights have the form of."""
    return few_steps_of(CATALOGUE.get(located.model.name.removeprefix(SYNTHETIC)))


def of_the_model(located: LocatedModel, num_steps: int, tell: Callable[[str], None]) -> list[Technique]:
    """Return the options that are one model's own: its LoRAs at other numbers of steps that they are made for than
    the usual one, and step caches with the schedules that `calibrate schedule` has left in the working folder."""
    loras, options = known_few_steps(located), list[Technique]()
    for lora in loras:
        usual = Distilled(kind=lora.kind).call_with(loras)["num_inference_steps"]
        most = {lora.steps[0], max(lora.steps)} - {usual}
        options += [Distilled(kind=lora.kind, steps=number) for number in sorted(most)]
    for file, cache in searched_caches(located, num_steps):
        tell(f"{file}: {'of another model or revision, left out' if cache is None else cache.text}")
        options += [] if cache is None else [cache]
    return options


def check_memory(objective: Objective, bench: Bench) -> None:
    """Raise UsageError, naming the least, for a memory limit that no recipe is predicted to keep."""
    limit = objective.max_memory_bytes
    if limit is None or bench.environment.device != "cuda":
        return
    space = Space.of(objective)
    saving = [text for option in space.options for text in option.facts.saves_memory]
    recipes = [Recipe(), *(resolve(text) for text in dict.fromkeys(saving))]
    bench.peaks.ask(recipes)
    if bench.request.batch == 1:
        name = bench.model.removeprefix(SYNTHETIC)
        bench.peaks.add(recorded(name, bench.full.height, bench.full.width))
    peaks = {recipe: peak for recipe in recipes if (peak := bench.peaks.of(recipe)) is not None}
    if peaks and min(peaks.values()) > limit:
        least = min(peaks, key=lambda recipe: peaks[recipe])
        raise UsageError(
            f"--max-memory {size(limit)} cannot be met: the smallest peak that `vivace plan` predicts is "
            f"{size(peaks[least])}, with {least.text}; give --max-memory {math.ceil(peaks[least] / 1e8) / 10:g}GB"
        )


def check_minutes(
    minutes: float | None,
    bench: Bench,
    began: float,
    least_s: float | None = None,
    likely_s: float | None = None,
) -> None:
    """Raise UsageError for minutes that do not suffice for a final; `least_s` and `likely_s` are seconds of a call of
    the baseline, while it is measured."""

    def needed_s(call_s: float | None) -> float:
        if call_s is not None:
            bench.pace.batch, bench.pace.base_s = bench.request.batch, call_s
        return time.monotonic() - began + bench.time.seconds_of_final([])

    if minutes is not None and needed_s(least_s) > 60 * minutes:
        needed = needed_s(likely_s)
        raise UsageError(
            f"--minutes {minutes:g} cannot be met: starting and comparing one recipe with the baseline takes about "
            f"{seconds(needed)}; give --minutes {math.ceil(needed / 30) / 2 + 0.5:g}"
        )


@dataclass
class FirstCalls(Forwarding):
    """A `Progress` that passes everything on, and refuses too few minutes as soon as a call of the baseline ends."""

    minutes: float | None
    bench: Bench
    began: float
    _started: float = 0.0

    def event(self, event: dict[str, Any]) -> None:
        self.progress.event(event)
        now = time.monotonic()
        if event.get("event") == "phase" and event.get("phase") == "warm-up":
            call_s = now - self._started
            least_s = _SHARE_OF_FIRST * call_s if event["done"] == 1 else call_s
            check_minutes(self.minutes, self.bench, self.began, least_s, call_s)
        self._started = now


@takes(SearchSettings)
def tune(model: str, settings: SearchSettings) -> Tuned:
    """Find the best recipe for a model on this machine, within limits, by measuring little.

    Measurements are kept in the store: the same call goes on where an interrupted one stopped, and a later one starts
    from its results.

    Args:
        model: what `vivace.load` takes.
        settings: the fields of `SearchSettings`, as keywords: `goal="memory"`, `minutes=5`.

    Raises:
        UsageError: options that contradict each other; the message names the limit and the nearest possible value.
        UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    return search_recipe(model, settings)


def search_recipe(model: str, settings: SearchSettings) -> Tuned:
    """Search by settings, checked here; see `tune`."""
    watcher = settings.watcher or Unwatched()
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
    judge = settings.judge(located)
    objective = settings.objective(judge)
    first = start_of(settings.start, objective)
    request = settings.images(objective)
    prompts = request.prompts or PROMPT_SETS[located.prompt_set]
    workload_of(located, request.of(prompts), request.batch)  # reports sizes that the model cannot draw
    with ExitStack() as stack:
        bench = _bench(stack, model, obtain(located), settings, judge, request)
        is_cpu = bench.environment.device == "cpu"
        sources = known_sources(model, bench.environment.device_name, objective, is_cpu=is_cpu)
        own = of_the_model(located, bench.full.num_inference_steps, watcher.note)
        space = space_of(objective, bench, [*own, *measured_elsewhere(sources)])
        check_memory(objective, bench)
        history, stored = history_of(bench)
        watcher.note(
            f"{len(space.options)} options, {len(space.cut)} left out{stored_summary(history, stored)}"
        )
        notes = [
            *judge.notes(bench.command),
            no_record(bench.environment.device_name, bench.environment.device),
        ]
        for note in filter(None, notes):
            watcher.note(f"note: {note}")
        watcher.note("measuring the baseline")
        run = bench.run
        bench.run = replace(run, progress=FirstCalls(run.progress, settings.minutes, bench, began))
        base = bench.start()
        bench.run = run
        if base is None or not base.is_measured:
            reason = "it could not be measured" if base is None else f"{base.outcome.value}: {base.reason}"
            raise Unsupported(
                f"the baseline of {model} failed here, and recipes are compared with it: {reason}"
            )
        bench.time.spend(settings.allowed_minutes, began)
        check_minutes(settings.minutes, bench, began)
        budget = Budget(math.inf if settings.trials is None else settings.trials)
        if settings.allowed_minutes is not None:
            budget = replace(budget, minutes=settings.allowed_minutes, timetable=bench.time, started=began)
        sources = (stored, *sources)
        sampler = ModelSampler(
            space,
            np.random.default_rng(settings.seed),
            tuple(source for source in sources if source.data),
            effects(
                space.options,
                dict(base.stages_s),
                objective,
                bench.full.num_inference_steps,
                is_cpu,
                known_few_steps(located),
            ),
            start=first,
            seconds_of=None if budget.timetable is None else bench.pace.of_trial,
            most_s=lambda: budget.most_s,
            peaks=bench.peaks.predicted,
        )
        search = Search(
            objective,
            space,
            sampler,
            bench,
            budget,
            judges=bench.judges,
            watcher=watcher,
            history=[*history, base],
        )
        pick = search.run()
        return Tuned(
            model=model,
            device_name=bench.environment.device_name,
            objective=objective,
            pick=pick,
            rows=tuple(priced(final_of(bench, pick), settings.price_per_hour)),
            history=tuple(latest(search.history).values()),
            cut=dict(space.cut),
            notes=tuple(notes_of(search, bench, pick)),
            store=bench.run.folder,
            judges=bench.judges,
            num_trials=search.num_trials,
            seconds=time.monotonic() - began,
            options=request.options,
            task=bench.task,
            explanation=search.explanation(sources),
            command=bench.command,
        )


def _bench(
    stack: ExitStack,
    model: str,
    located: LocatedModel,
    settings: SearchSettings,
    judge: QualityJudge,
    request: ImageRequest,
) -> Bench:
    run = settings.run
    stack.enter_context(Store.create(run.folder)).close()
    launcher = run.launcher or stack.enter_context(start_launcher(settings.device))
    threads = settings.timing.threads or default_threads(located)
    return Bench(
        model=model,
        located=located,
        objective=settings.objective(judge),
        request=request,
        prompts=tuple(request.prompts or PROMPT_SETS[located.prompt_set]),
        judges=judge.compares,
        judged_by=judge,
        run=replace(run, launcher=launcher, command=run.command or f"vivace tune {model}"),
        environment=ask_environment(launcher, settings.device, threads),
        device=settings.device,
        timing=settings.timing.model_copy(update={"threads": threads}),
    )


def stored_summary(history: Sequence[Result], stored: PriorSource) -> str:
    number = len({result.recipe for result in history if not result.recipe.is_baseline})
    others = len({datum.recipe for datum in stored.data})
    text = ""
    if number:
        text += f"; the store has {number} recipe{'' if number == 1 else 's'} of this search, which goes on"
    if others:
        text += f"; it learns from {others} that were measured otherwise"
    return text


def final_of(bench: Bench, pick: Result | None) -> list[Row]:
    """Return the rows of the last final with the pick, stored ones included; without a pick, of the last."""
    rows = bench.finals.rows(None if pick is None else pick.recipe)
    return [drop_unproven_interval(row) for row in rows]


def drop_unproven_interval(row: Row) -> Row:
    """Return the row, without the speed-up's interval if there is a single round, whose calls share its luck."""
    if row.speedup is None or len(row.record.rounds) > 1:
        return row
    return replace(row, speedup=Interval(row.speedup.point, None, None), verdict=Verdict.UNCLEAR)


def history_of(bench: Bench) -> tuple[list[Result], PriorSource]:
    results: list[Result] = []
    others: list[Datum] = []
    with Store.create(bench.run.folder) as store:
        for compared in reversed(list(store.comparisons(repeated=True))):
            run, baseline = compared.run, compared.records[0]
            assert run is not None
            trial, environment = baseline.trial, baseline.environment
            if not trial.recipe.is_baseline or run.purpose is Purpose.IMAGES:  # whose times are of one call
                continue
            if trial.model != bench.located.model or trial.device != bench.environment.device:
                continue
            rung, steps = bench.rung_of(run, trial.workload)
            is_here = environment.model_copy(update={"place": None}) == bench.environment
            if is_here and rung is Rung.FINAL and bench.judged_by.is_of(run):
                bench.finals.compared.append(compared)
                rows = bench.finals.rows_with_images(compared.records, compared.quality, store)
            else:
                rows = compared.rows(bench.objective.limits)
            for row in rows:
                result = bench.judged_by.adjust(
                    bench.result_of(row, rows[0], rung or Rung.SCREENED, steps), run
                )
                if result is None:
                    continue
                if rung is Rung.FINAL and result.is_measured and bench.judges and result.gate is None:
                    continue  # of a final that was interrupted
                if is_here and rung is not None:
                    results.append(result)
                elif result.gain is not None and not result.recipe.is_baseline:
                    error = _OTHER_WORKLOAD if is_here else _OTHER_MACHINE
                    others.append(Datum(result.recipe, result.gain, error))
    if bench.finals.compared:
        bench.finals.read()
    bench.time.note(latest(results).values())
    return results, PriorSource("this store", tuple(others))


_GOES_ON = "The same command goes on from here."
_SAME_ONLY = "quality cannot be judged, so only techniques that keep the image were searched"


def notes_of(search: Search, bench: Bench, pick: Result | None) -> Iterator[str]:
    if (unknown := no_record(bench.environment.device_name, bench.environment.device)) is not None:
        yield unknown
    if of_judge := bench.judged_by.notes(bench.command):
        yield from of_judge
    elif not bench.judges:
        what = "a ControlNet with random" if bench.request.has_random_controlnet else "random"
        yield f"{what} weights: {_SAME_ONLY}"
    if search.exhausted:
        yield "every recipe that promised a gain has been measured"
    yield from _out_of_time(search, bench, pick)
    if pick is None:
        yield from unmet(search)
        yield from endings(search.history)
        if bench.time.ends_at is not None:
            yield _what_to_do(search, bench)


def _what_to_do(search: Search, bench: Bench) -> str:
    """Describe how much more time would decide, or that only another recipe would help."""
    if left := search.open_ends():
        minutes = bench.time.minutes_to_decide(left[0])
        return f"{left[0].recipe.text} may still pass: --minutes {minutes:g} would decide. {_GOES_ON}"
    if not search.num_trials:
        minutes = bench.time.minutes_to_decide(bench.time.placeholder)
        return f"there was no time to measure a recipe; give --minutes {minutes:g}. {_GOES_ON}"
    minutes = math.ceil(bench.time.total_s / 30)
    return (
        f"nothing that was measured can still pass; --minutes {minutes} would try other recipes. {_GOES_ON}"
    )


def endings(history: Sequence[Result]) -> Iterator[str]:
    counted: Counter[str] = Counter()
    for result in latest(history).values():
        if result.recipe.is_baseline or result.outcome is Outcome.UNSUPPORTED:  # refused, not tried
            continue
        ending = "better, but not proved within the limits"
        if not result.is_measured:
            ending = result.outcome_in_words
        elif result.own_gain <= 0:
            ending = "no better than the baseline"
        elif result.is_ruined:
            ending = "better, but the quality fails"
        counted[ending] += 1
    if counted:
        what = ", ".join(f"{number} {ending}" for ending, number in counted.most_common())
        yield f"of {count(counted.total(), 'recipe')} tried: {what}"


def _out_of_time(search: Search, bench: Bench, pick: Result | None) -> Iterator[str]:
    """Yield the skipped parts of the final, and what remains unproved."""
    rows = bench.finals.rows(None if pick is None else pick.recipe)
    short = [row.recipe for row in rows[1:] if row.latency and len(row.record.rounds) < FINAL_ROUNDS]
    late = [
        result.recipe.text
        for result in latest(search.history).values()
        if bench.judges
        and result.rung is Rung.FINAL
        and result.is_measured
        and not result.recipe.is_baseline
        and result.gate is None
    ]
    if short and pick is None:
        proves = f"after 1 of {FINAL_ROUNDS} rounds of the final, which proves no speed-up"
        yield f"the time ended {proves}: {', '.join(short)}. {_GOES_ON}"
    if bench.left_out:
        names = ", ".join(recipe.text for recipe in bench.left_out)
        yield f"the time ended before the final had measured {names}. {_GOES_ON}"
    if late:
        yield (
            f"the time ended before the images of {', '.join(late)} were compared with the baseline's, so the "
            f"quality is not known. {_GOES_ON}"
        )
    if pick is None and (bench.left_out or late or short) and (best := best_of(search.history)) is not None:
        times = f"{math.exp(best.own_gain):.2f}x before the final"
        yield f"the best so far, not proved, is {best.recipe.text}: {times}"


def unmet(search: Search) -> Iterator[str]:
    """Yield the limit that no measured recipe kept, and the nearest recipe."""
    objective = search.objective
    measured = [result for result in latest(search.history).values() if result.is_measured]
    for option, limit, name, in_words in (
        ("--max-memory", objective.max_memory_bytes, "peak_bytes", size),
        ("--max-first-call", objective.max_first_call_s, "first_call_s", seconds),
    ):
        reached = [(value, r.recipe.text) for r in measured if (value := getattr(r, name)) is not None]
        if limit is not None and reached and min(reached)[0] > limit:
            value, recipe = min(reached)
            yield f"{option} {in_words(limit)} was not met; nearest is {in_words(value)} with {recipe}"
    doubtful = [result for result in measured if result.rung is Rung.FINAL and result.gate is Gate.UNCLEAR]
    if doubtful:
        best = max(doubtful, key=lambda result: result.own_gain)
        times = f"{math.exp(best.own_gain):.2f} times as fast, but its quality is not proven"
        yield f"{best.recipe.text} was {times}: {best.reason}"
