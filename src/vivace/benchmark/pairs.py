"""Compare two recipes by interleaved pairs of rounds until the verdict is sure: `vivace.compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vivace.answers.answer import Answer, CiCase
from vivace.answers.formatting import count
from vivace.benchmark.comparison import comparisons
from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.rounds.runner import ask_environment, run_trials
from vivace.benchmark.rounds.worker_requests import start_launcher
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Purpose
from vivace.benchmark.store.images import save_sources
from vivace.errors import UsageError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import STUDY_ONLY, Study, WorkloadRequest, pop_fields, takes_fields
from vivace.foundation.spec.timing import Timing
from vivace.foundation.stats import Verdict
from vivace.foundation.stats.sequential import DEFAULT_MAX_PAIRS, Decision, decide, looks
from vivace.report import run_answer
from vivace.report.host import moves_of, steady_seconds
from vivace.report.rows import Row, rows_of
from vivace.runtime.workloads import default_threads

OnPair = Callable[[Decision, Sequence[Record]], None]


@dataclass(frozen=True)
class PairSettings:
    """How two recipes are compared.

    Attributes:
        fail_if: allowed slowdown of the second: 0.03 is 3 %. The comparison then ends when it is sure whether the
            second recipe is slower by more than that.
        max_pairs, max_minutes: limits, after which the verdict may be unclear. No pair is begun after `max_minutes`.
        store: the folder of the store; created if there is none.
        command: the command line to store with the run; None for the equivalent `vivace compare`.
        on_pair: called after each pair with the decision so far and the records.
        progress: receives events while rounds run.
        launcher: a running launcher; None to start one.
    """

    fail_if: float | None = None
    max_pairs: int = DEFAULT_MAX_PAIRS
    max_minutes: float = 60.0
    store: str | Path = DEFAULT_STORE
    command: str | None = None
    on_pair: OnPair | None = None
    progress: Progress = SILENT
    launcher: Launcher | None = None


@dataclass(frozen=True)
class Paired:
    """The result of comparing two recipes.

    Attributes:
        decision: None if a recipe could not be measured; its record says why.
        records: of the first and the second recipe.
        stopped_by: "verdict", "pairs" or "minutes": what ended the comparison; None if a recipe failed.
    """

    decision: Decision | None
    records: tuple[Record, ...]
    stopped_by: str | None

    @property
    def rows(self) -> list[Row]:
        """The records with their statistics and warnings."""
        return rows_of(list(self.records))

    def _repr_html_(self) -> str:
        """Return the table and the charts for notebooks."""
        from vivace.answers.page import in_notebook, page_of

        started = self.records[0].rounds[0].started_at
        return in_notebook(page_of(run_answer.answer_of(self.rows, command="compare", started_at=started)))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as `vivace compare --format json` prints it."""
        fields: dict[str, Any] = {
            "recipes": [record.trial.title for record in self.records],
            "model": self.records[0].trial.model.name,
            "outcomes": [record.outcome.value for record in self.records],
            "reasons": [record.reason for record in self.records],
            "median_s": [None if row.latency is None else row.latency.median.point for row in self.rows],
            "warnings": list(dict.fromkeys(warning for row in self.rows for warning in row.warnings)),
            "stopped_by": self.stopped_by,
        }
        if self.decision is None:
            return fields
        decision = self.decision
        return fields | {
            "verdict": decision.verdict.value,
            "regressed": decision.regressed,
            "fail_if": decision.fail_if,
            "time_ratio": decision.shown.point,
            "interval": None if decision.shown.low is None else [decision.shown.low, decision.shown.high],
            "pairs": decision.num_pairs,
        }


@takes_fields(PairSettings, WorkloadRequest, Study, without=STUDY_ONLY)
def compare(model: str, first: str, second: str, **keywords: Any) -> Paired:
    """Measure interleaved pairs of two recipes until the second is faster, slower or the same (within 1 %).

    Each round runs in a separate process and is stored; the same call goes on where an interrupted one stopped. The
    data is looked at after 3, 4, 6, 8, 12, ... pairs; see `vivace.foundation.stats.sequential` for the error rates.

    Args:
        model: what `vivace.load` takes.
        first, second: recipes; the same text twice compares a recipe with itself.
        keywords: the fields of `PairSettings` and `WorkloadRequest`, `timing` (its `rounds` are ignored) and `device`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    given = pop_fields(PairSettings, keywords)
    settings = PairSettings(**{name: value for name, value in given.items() if value is not None})
    study = Study.of(model, [first, second], quality=False, rivals=False, **keywords)
    (comparison, *others) = comparisons(study)
    if others or comparison.largest_batch:
        raise UsageError("compare takes one model and one batch size, a number")
    timing = study.timing
    if timing.threads is None:
        timing = timing.model_copy(update={"threads": default_threads(comparison.located)})
    command = settings.command or f"vivace compare '{first}' '{second}' --model {model}"
    with ExitStack() as stack:
        store = stack.enter_context(Store.create(Path(settings.store)))
        if comparison.sources is not None:
            save_sources(store.folder / "sources", comparison.sources.by_sha)
        launcher = settings.launcher or stack.enter_context(start_launcher(study.device))
        environment = ask_environment(launcher, study.device, timing.threads)
        trials = comparison.trials(environment.device)
        store.start_run(command, trials, environment, rounds=settings.max_pairs, purpose=Purpose.PAIRS)
        running = RunSettings(progress=settings.progress, launcher=launcher)

        def measure(number: int) -> list[Record]:
            timing_ = timing.model_copy(update={"rounds": number})
            return run_trials(trials, environment, timing_, store, running)

        stored = [
            {index for index, round_ in store.rounds(trial.key(environment)).items() if _has(round_, timing)}
            for trial in trials
        ]
        return measure_pairs(measure, len(stored[0] & stored[1]), settings)


def _has(round_: Round, timing: Timing) -> bool:
    return round_.outcome is Outcome.MEASURED and len(round_.samples) >= (timing.repeats or 1)


def measure_pairs(measure: Callable[[int], list[Record]], num_stored: int, settings: PairSettings) -> Paired:
    """Measure pair by pair, and look at fixed numbers of pairs until the decision is final or a limit is reached; the
    store has `num_stored` of them."""
    steps = looks(settings.max_pairs)
    num_looks = len(steps) + 1  # one more if time runs out
    until = time.monotonic() + 60 * settings.max_minutes
    number = min(settings.max_pairs, max(1, num_stored))
    while True:
        records = measure(number)
        times = samples_of(records)
        if times is None:
            return Paired(None, tuple(records), None)
        decision = decide(*times, num_looks, settings.fail_if, moves_of(records))
        if settings.on_pair is not None:
            settings.on_pair(decision, records)
        is_sure, is_last = number in steps and decision.is_final, number >= settings.max_pairs
        if is_sure or is_last or time.monotonic() >= until:
            by = "verdict" if decision.is_final else "pairs" if is_last else "minutes"
            return Paired(decision, tuple(records), by)
        number += 1


def samples_of(records: Sequence[Record]) -> tuple[list[list[float]], list[list[float]]] | None:
    """Return the seconds of both recipes by round, for rounds that both have; None if either was not measured."""
    steady = steady_seconds(records)
    if len(records) < 2 or not all(steady):
        return None
    shared = sorted(set(steady[0]) & set(steady[1]))
    return [list(steady[0][i]) for i in shared], [list(steady[1][i]) for i in shared]


REGRESSED, NOT_MEASURED, UNCLEAR = 1, 4, 5
"""Exit codes, beside 0."""


def answer_of(paired: Paired) -> Answer:
    status, verdict, result = _judge(paired)
    data = paired.to_dict() | {"exit_code": status}
    b = paired.records[1].trial.title
    outcome: Literal["passed", "failure", "error"] = (
        "passed" if status == 0 else "failure" if status == REGRESSED else "error"
    )
    return Answer(
        command="compare",
        headline=f"{verdict}: {result}",
        data=data,
        verdict=verdict,
        notes=tuple(data["warnings"]),
        cases=(CiCase(f"{b} is no slower", outcome, f"{verdict}: {result}"),),
    )


def _judge(paired: Paired) -> tuple[int, str, str]:
    """Return the exit code of a comparison, its verdict and the figures in words."""
    decision = paired.decision
    if decision is None:
        failed = next(record for record in paired.records if record.outcome is not Outcome.MEASURED)
        return NOT_MEASURED, failed.trial.title, f"{failed.outcome.value}: {failed.reason}"
    a, b = (record.trial.title for record in paired.records)
    result = f"{b} against {a}: {difference(decision)}, {count(decision.num_pairs, 'pair')}"
    option = "--max-minutes" if paired.stopped_by == "minutes" else "--max-pairs"
    limit = f"give a larger {option} to the same command, or a quieter machine"
    if decision.fail_if is not None:
        allowed = f"{100 * decision.fail_if:g} %"
        if decision.regressed is None:
            unsure = f"whether it is slower by more than {allowed} is not sure"
            return UNCLEAR, "unclear", f"{result}; {unsure}; {limit}"
        if decision.regressed:
            return REGRESSED, "slower than allowed", f"{result}; {allowed} is allowed"
        return 0, f"not slower by more than {allowed}", result
    if decision.verdict is Verdict.UNCLEAR:
        return UNCLEAR, "unclear", f"{result}; {limit}"
    return (REGRESSED if decision.verdict is Verdict.SLOWER else 0), decision.verdict.value, result


def difference(decision: Decision) -> str:
    """Return e.g. "3.1 % more time [+1.2, +5.0]"."""
    ratio = decision.shown
    percent = 100 * (ratio.point - 1)
    text = f"{abs(percent):.1f} % {'more' if percent >= 0 else 'less'} time"
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{100 * (ratio.low - 1):+.1f}, {100 * (ratio.high - 1):+.1f}]"
