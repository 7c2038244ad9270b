"""Run studies: `vivace.bench` and `run_study`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vivace.benchmark.comparison import Comparison, comparisons
from vivace.benchmark.places.local_pool import gpu_pool, gpus_of_this_host
from vivace.benchmark.places.spread_trials import Pool, SpreadTrials
from vivace.benchmark.rounds.quality_pass import add_figures, draw_noise_floor
from vivace.benchmark.rounds.runner import (
    ask_environment,
    ask_largest_batch,
    run_trials,
    with_batch,
)
from vivace.benchmark.rounds.work import add_work, plan_again
from vivace.benchmark.rounds.worker_requests import start_launcher as start_launcher
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.run_settings import DEFAULT_SETTINGS, RunSettings
from vivace.benchmark.store import Invocation, Store
from vivace.benchmark.store.images import save_sources
from vivace.errors import UnknownModel, Unsupported, UsageError, WorkerError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.study import QualityRequest, Study, WorkloadRequest, pop_fields, takes_fields
from vivace.foundation.spec.timing import Timing
from vivace.foundation.stats.sequential import looks
from vivace.foundation.stats.until import MOST_ROUNDS, Until
from vivace.models.find import LocatedModel
from vivace.models.scorers import LocatedScorer, find_scorer, find_witness
from vivace.report.rows import log_speedups
from vivace.runtime.workloads import default_threads

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

USUAL_SCORER = "openai/clip-vit-large-patch14"


@takes_fields(RunSettings, Study, WorkloadRequest, QualityRequest, without=("models", "enabled"))
def bench(
    model: str | Sequence[str] | DiffusionPipeline | Callable[[], DiffusionPipeline],
    recipes: Sequence[str],
    **keywords: Any,
) -> Run:
    """Compare recipes on a model and return the run.

    Rounds that the store already holds are not measured again. Each round runs in a separate process. A round that
    crashes, hangs or runs out of memory gets that outcome and does not affect the others.

    Args:
        model: what `vivace.load` takes, or a list of it; or a diffusers pipeline, or a function that makes one. These
            are measured in this process, each recipe on a pipeline of its own: a copy of yours, beside which it has to
            fit, or what the function returns. There nothing limits a round's time, and a crash ends the program.
        recipes: e.g. ["baseline", "tiny_vae+steps(20)"]; the first is the baseline.
        keywords: the fields of `RunSettings` (vivace.benchmark), and of `Study`, `WorkloadRequest` and
            `QualityRequest` (vivace.foundation.spec.study), e.g. `store="measured"`, `until="faster|same 3%"`,
            `prompts=[...]`, `num_inference_steps=20`, `timing=Timing(rounds=3)`, `quality=False`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    given = pop_fields(RunSettings, keywords)
    settings = RunSettings(
        **{"plan": True} | {name: value for name, value in given.items() if value is not None}
    )
    if isinstance(model, str | Sequence):
        return run_study(Study.of(model, recipes, **keywords), settings)
    from vivace.benchmark.live import InThisProcess, check_live, live_model

    if settings.is_spread:
        raise UsageError(
            "gpus and ray measure in other processes; give bench the name or the folder of the model"
        )
    with live_model(model) as live, InThisProcess() as launcher:
        study = Study.of(live.model.name, recipes, **{"device": live.device} | keywords)
        check_live(comparisons(study))
        return run_study(study, replace(settings, launcher=launcher, plan=False))


def run_study(study: Study, settings: RunSettings = DEFAULT_SETTINGS) -> Run:
    """Run a study and return its result.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    settings.check(study)
    checked = comparisons(study)
    if settings.is_spread:
        check_one_gpu(checked)
    judges = [find_judges(each.located, study.quality, is_judged=each.judged) for each in checked]
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    with ExitStack() as stack:
        store = stack.enter_context(Store.create(settings.folder))
        launcher = settings.launcher or stack.enter_context(start_launcher(study.device))
        pool = settings.pool
        if pool is None and settings.is_spread:
            pool = stack.enter_context(closing(start_pool(settings, study.device, launcher)))
        for comparison in checked:
            if comparison.sources is not None:
                save_sources(store.folder / "sources", comparison.sources.by_sha)
        given = replace(settings, launcher=launcher, pool=pool)

        def measure(rounds: int) -> Run:
            timing = study.timing.model_copy(update={"rounds": rounds})
            running = replace(given, canaries=settings.canaries and rounds > 1)
            timed = study.model_copy(update={"timing": timing})
            compared: list[Compared] = []
            for comparison, scorer in zip(checked, judges, strict=True):
                compared += _Comparing(timed, comparison, scorer, store, launcher, running).run()
            return Run(timed, settings.folder, tuple(compared))

        if settings.until is None:
            run = measure(study.timing.rounds)
        else:
            assert isinstance(settings.until, Until), "texts are parsed"
            run = go_on(measure, settings.until, study.timing.rounds, settings.max_minutes)
        if settings.plan and any(r.started_at >= began for record in run.records for r in record.rounds):
            run = replace(run, planned=tuple(plan_again(run.records, launcher)))
    return run


@dataclass(frozen=True)
class _Comparing:
    """A comparison in progress: all rounds, the count of the work, then the quality pass."""

    study: Study
    comparison: Comparison
    scorer: LocatedScorer | None
    store: Store
    launcher: Launcher
    settings: RunSettings

    def run(self) -> list[Compared]:
        command = self.settings.command or _bench_command(self.comparison)
        if self.settings.pool is None:
            return [self._here(command)]
        return self._spread(self.settings.pool, command)

    def _here(self, command: str) -> Compared:
        timing = self._timing()
        environment = ask_environment(self.launcher, self.study.device, timing.threads)
        trials = self.comparison.trials(environment.device)
        if self.comparison.largest_batch:
            batch = ask_largest_batch(self.launcher, trials[0], timing, self.store.sources)
            trials = [with_batch(trial, batch) for trial in trials]
        run = self.store.start_run(
            command, trials, environment, self._scorer_id(), timing.rounds, self.settings.purpose
        )
        records = run_trials(
            trials,
            environment,
            timing,
            self.store,
            self.settings,
            largest_batch=self.comparison.largest_batch,
            rival_of=self.comparison.rival_of,
        )
        return self._judged(records, run)

    def _spread(self, pool: Pool, command: str) -> list[Compared]:
        timing = self._timing()
        live = pool.environments(timing.threads)
        spread = SpreadTrials(
            self.comparison.trials(live[0].device),
            timing,
            self.store,
            live,
            pool.num_places,
            self.settings,
        )
        try:
            pool.run(spread)
        except BaseException:
            spread.note_runs(command, self._scorer_id(), self.settings.purpose, interrupted=True)
            raise
        finally:
            self.settings.progress.end()
        runs = spread.note_runs(command, self._scorer_id(), self.settings.purpose)
        if spread.waiting:
            raise WorkerError(
                f"no place is left for {spread.waiting} of the trials; finished rounds are kept, and the same command "
                "goes on with the others"
            )
        return [self._judged(records, run) for records, run in runs]

    def _judged(self, records: list[Record], run: Invocation) -> Compared:
        if self.comparison.judged and records:
            threads = self._timing().threads
            device = records[0].environment.device
            if records[0].environment.place is not None:
                # Another host may have a GPU where this one has none.
                device = ask_environment(self.launcher, "auto", threads).device
            self._judge(records, device, threads)
        records = add_work(records, self.store, self.launcher, self.settings.deadline)
        return Compared(tuple(records), self.store.quality_pass(run), run)

    def _judge(self, records: list[Record], device: str, threads: int | None) -> None:
        start = time.perf_counter()
        store, launcher, settings = self.store, self.launcher, self.settings
        show = settings.progress.quality
        num_drawn = num_scored = 0
        try:
            if self.study.quality.noise_floor:
                num_drawn = draw_noise_floor(records[0], store, launcher, threads, show, settings.deadline)
            num_scored = add_figures(
                records,
                store,
                launcher,
                self.scorer,
                device,
                threads,
                self.study.quality.lpips,
                show,
                settings.deadline,
            )
        finally:
            settings.progress.end_quality(num_scored, num_drawn, time.perf_counter() - start)

    def _timing(self) -> Timing:
        timing = self.study.timing
        if timing.threads is not None:
            return timing
        return timing.model_copy(update={"threads": default_threads(self.comparison.located)})

    def _scorer_id(self) -> str | None:
        return self.scorer.id if self.scorer else None


def check_one_gpu(checked: Sequence[Comparison]) -> None:
    """Refuse recipes that take several GPUs for one image: a place is one GPU."""
    for comparison in checked:
        for recipe in comparison.recipes:
            if any(technique.facts.num_gpus > 1 for technique in recipe):
                raise UsageError(
                    f"{recipe.text} takes several GPUs for one image, and --gpus and --ray measure each recipe on one; "
                    "bench it without them"
                )


def start_pool(settings: RunSettings, device: str, launcher: Launcher) -> Pool:
    if settings.ray is not None:
        from vivace.benchmark.places.ray_nodes import RayNodes

        return RayNodes(settings.ray, device)
    assert settings.gpus is not None
    return gpu_pool(gpus_of_this_host(launcher, settings.gpus))


def find_judges(
    located: LocatedModel, quality: QualityRequest, *, is_judged: bool = True
) -> LocatedScorer | None:
    """Return the CLIP model that scores a model's images, with the second witness on request; None for no scores. With
    "auto", a scorer other than the model's own is never downloaded."""
    if not is_judged:
        return None
    scorer, witness = _find_scorer(located, quality.scorer), quality.witness
    if witness is None:
        return scorer
    if scorer is None:
        raise UsageError(f"--witness {witness}: it is a second model beside CLIP; add --scorer NAME")
    return replace(scorer, witness=find_witness(witness))


def _find_scorer(located: LocatedModel, name: str | None) -> LocatedScorer | None:
    if name is None:
        return None
    if name != "auto":
        return find_scorer(name)
    entry = located.entry
    if entry is not None and entry.scorer is not None:
        return find_scorer(entry.scorer)
    if entry is not None and located.model.source == "embedded":
        return None
    try:
        return find_scorer(USUAL_SCORER, download=False)
    except (Unsupported, UnknownModel):
        return None


def _bench_command(comparison: Comparison) -> str:
    parts = ["vivace", "bench", "--model", comparison.located.model.name]
    if comparison.workload.task != "text":
        parts += ["--task", comparison.workload.task]
    for recipe in comparison.recipes:
        parts += ["--recipe", recipe.text]
    return shlex.join(parts)


def go_on(run_rounds: Callable[[int], Run], until: Until, least: int, max_minutes: float) -> Run:
    """Add rounds, from `least` on, until every recipe has an answer or the time is over; return the run with them."""
    start = time.monotonic()
    numbers = [number for number in looks(MOST_ROUNDS) if number > max(2, least)]
    numbers.insert(0, max(2, least))
    for position, number in enumerate(numbers):
        run = run_rounds(number)
        open_, sentences = _answers(run, until, len(numbers))
        spent = time.monotonic() - start
        following = numbers[position + 1] if position + 1 < len(numbers) else None
        if not open_ or following is None:
            break
        expected = spent / number * (following - number)
        if spent + expected > 60 * max_minutes:
            sentences.append(
                f"stopped after {number} rounds: {following} would take longer than --max-minutes {max_minutes:g}"
            )
            break
    return replace(run, answers=tuple(sentences))


def _answers(run: Run, until: Until, num_looks: int) -> tuple[bool, list[str]]:
    """Return whether any recipe has no answer yet, and a line for each."""
    is_open, sentences = False, []
    for compared in run.comparisons:
        for record, ratio, rounds in log_speedups(compared.records):
            name = record.trial.title
            if ratio is None:
                sentences.append(f"{name}: {record.outcome.value.replace('_', ' ')}")
                continue
            answer = until.answer(ratio, rounds, num_looks)
            if answer is not None:
                is_same = answer == "same" and until.same_within is not None
                margin = f" within {100 * (until.same_within or 0):g} %" if is_same else ""
                sentences.append(f"{name}: {answer.value}{margin}, after {rounds} rounds")
            elif until.is_missed(ratio, num_looks):
                sentences.append(f"{name}: surely not, after {rounds} rounds ({ratio.interval().point:.3g}x)")
            else:
                is_open = True
                sentences.append(f"{name}: undecided after {rounds} rounds")
    return is_open, sentences
