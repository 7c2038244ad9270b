"""Compare two recipes by interleaved pairs of rounds until the verdict is sure: `vivace.compare`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

from vivace.benchmark.comparison import comparisons
from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.rounds.runner import ask_environment, run_trials
from vivace.benchmark.store import Store
from vivace.benchmark.store.images import save_sources
from vivace.benchmark.store.invocation import Purpose
from vivace.benchmark.studies import start_launcher
from vivace.errors import UsageError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import CallKeywords, Study
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.foundation.stats.sequential import DEFAULT_MAX_PAIRS, Decision, decide, looks
from vivace.report.machine_speed import moves_of, steady_seconds
from vivace.report.rows import Row, rows_of
from vivace.report.run_answer import answer_of
from vivace.runtime.workloads import default_threads

DEFAULT_MAX_MINUTES = 60.0
OnNote = Callable[[str], None]
_RECIPES, _CANARY = 2, 0.5
"""What runs in a pair: a round of each recipe, and a canary, which takes about half of one."""


class OnPair(Protocol):
    """Called after each pair with the decision so far and the records."""

    def __call__(self, decision: Decision, records: Sequence[Record]) -> None: ...


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
        return in_notebook(page_of(answer_of(self.rows, command="compare", started_at=started)))

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


def compare(
    model: str,
    first: str,
    second: str,
    *,
    fail_if: float | None = None,
    max_pairs: int = DEFAULT_MAX_PAIRS,
    max_minutes: float = DEFAULT_MAX_MINUTES,
    store: str | Path = DEFAULT_STORE,
    command: str | None = None,
    on_pair: OnPair | None = None,
    on_note: OnNote | None = None,
    progress: Progress | None = None,
    launcher: Launcher | None = None,
    **fields: Unpack[CallKeywords],
) -> Paired:
    """Measure interleaved pairs of two recipes until the second is faster, slower or the same (within 1 %).

    Each round runs in a separate process and is stored; the same call goes on where an interrupted one stopped. The
    data is looked at after 3, 4, 6, 8, 12, ... pairs; see `vivace.foundation.stats.sequential` for the error rates.

    Args:
        model: what `vivace.load` takes.
        first, second: recipes; the same text twice compares a recipe with itself.
        fail_if: allowed slowdown of the second: 0.03 is 3 %. The comparison then ends when it is sure whether the
            second recipe is slower by more than that.
        max_pairs, max_minutes: limits, after which the verdict may be unclear. No pair is begun after `max_minutes`.
        store: the folder of the store; created if there is none.
        command: the command line to store with the run; None for the equivalent `vivace compare`.
        on_pair, progress: receive the measurements.
        on_note: called if no verdict can come within `max_minutes`, before that time is spent.
        launcher: a running launcher; None to start one.
        fields: the fields of `WorkloadRequest`, `timing` (its `rounds` are ignored) and `device`, as for
            `vivace.bench`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    study = Study.of(model, [first, second], quality=False, rivals=False, **fields)
    (comparison, *others) = comparisons(study)
    if others or comparison.largest_batch:
        raise UsageError("compare takes one model and one batch size, a number")
    timing = study.timing
    if timing.threads is None:
        timing = timing.model_copy(update={"threads": default_threads(comparison.located)})
    with ExitStack() as stack:
        opened = stack.enter_context(Store.create(Path(store)))
        if comparison.sources is not None:
            save_sources(opened.folder / "sources", comparison.sources.by_sha)
        if launcher is None:
            launcher = stack.enter_context(start_launcher(study.device))
        environment = ask_environment(launcher, study.device, timing.threads)
        trials = [
            Trial(
                model=comparison.located.model,
                recipe=recipe.spec,
                workload=comparison.workload,
                device=environment.device,
                repetition=repetition,
            )
            for recipe, repetition in zip(
                comparison.recipes,
                (0, int(comparison.recipes[0].text == comparison.recipes[1].text)),
                strict=True,
            )
        ]
        command_line = command or f"vivace compare '{first}' '{second}' --model {model}"
        opened.start_run(command_line, trials, environment, rounds=max_pairs, purpose=Purpose.PAIRS)

        def measure(number: int) -> list[Record]:
            timing_ = timing.model_copy(update={"rounds": number})
            return run_trials(trials, environment, timing_, opened, launcher, progress=progress or SILENT)

        number, max_s = _num_pairs(trials, environment, timing, opened), max_minutes * 60
        stored = [list(opened.rounds(trial.key(environment)).values()) for trial in trials]
        note = outlook(max_s, number, max_pairs, pair_seconds(stored), timing)
        if note is not None and on_note is not None:
            on_note(note)

        def on_time(number: int, pair_s: float) -> None:
            late = outlook(max_s, number, max_pairs, pair_s, timing, begun=True)
            if late is not None and on_note is not None:
                on_note(late)

        return _sequential(measure, number, fail_if, max_pairs, max_s, on_pair, on_time)


def _num_pairs(trials: Sequence[Trial], environment: Environment, timing: Timing, store: Store) -> int:
    """Return how many pairs the store has."""
    measured = [
        {
            index
            for index, round_ in store.rounds(trial.key(environment)).items()
            if round_.outcome is Outcome.MEASURED and len(round_.samples) >= (timing.repeats or 1)
        }
        for trial in trials
    ]
    return len(measured[0] & measured[1])


class _Measure(Protocol):
    """Measures up to a number of pairs, stored ones included, and returns the records."""

    def __call__(self, number: int) -> list[Record]: ...


def _sequential(
    measure: _Measure,
    num_stored: int,
    fail_if: float | None,
    max_pairs: int,
    max_s: float,
    on_pair: OnPair | None,
    on_time: Callable[[int, float], None] = lambda number, seconds: None,
) -> Paired:
    """Measure pair by pair, and look at fixed numbers of pairs until the decision is final or a limit is reached.

    Args:
        num_stored: pairs that the store has.
        on_time: called after the first new pair with the number of pairs, and its seconds.
    """
    steps = looks(max_pairs)
    num_looks = len(steps) + 1  # one more if time runs out
    started = time.monotonic()
    number = min(max_pairs, max(1, num_stored))
    is_timed = False
    while True:
        began = time.monotonic()
        records = measure(number)
        took_s = time.monotonic() - began
        times = samples_of(records)
        if times is None:
            return Paired(None, tuple(records), None)
        decision = decide(*times, num_looks, fail_if, moves_of(records))
        if on_pair is not None:
            on_pair(decision, records)
        is_last = number >= max_pairs
        if number > num_stored and not is_timed and not (number in steps and decision.is_final):
            is_timed = True
            on_time(number, took_s)
        is_late = not is_last and time.monotonic() - started >= max_s
        if (number in steps and decision.is_final) or is_last or is_late:
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


def outlook(
    max_s: float, num_pairs: int, max_pairs: int, pair_s: float | None, timing: Timing, *, begun: bool = False
) -> str | None:
    """Return a warning if no verdict can, or may, be reached in time; None if one is likely.

    Args:
        max_s: seconds after which no pair is begun.
        num_pairs: existing pairs; the next look at them may decide.
        pair_s: seconds of a pair; None if it is not known yet.
        begun: whether the last of them has been measured within this time, `pair_s` ago.
    """
    steps = looks(max_pairs)
    left = [step for step in steps if step > num_pairs]
    if not left or (num_pairs in steps and not begun):
        return None  # the existing pairs may decide
    missing = left[0] - num_pairs
    before_last = missing - 1 + int(begun)
    if pair_s is not None:
        if before_last * pair_s < max_s:
            return None
        return (
            f"a verdict needs {left[0]} pairs, {missing} more than there are, and a "
            f"pair takes about {pair_s:.0f} s: "
            f"--max-minutes {max_s / 60:g} ends before; give --max-minutes {_minutes(before_last * pair_s)} or more"
        )
    if timing.repeats is not None:
        return None  # a call may be short
    longest_s = _RECIPES * 2 * timing.max_seconds  # warm-up and timed calls
    if before_last * longest_s < max_s:
        return None
    return (
        f"a verdict needs {left[0]} pairs, and a pair takes up to {longest_s:.0f} s and more: --max-minutes "
        f"{max_s / 60:g} may end before; give --max-minutes {_minutes(before_last * longest_s)} or more"
    )


def pair_seconds(rounds: Sequence[Sequence[Round]]) -> float | None:
    """Estimate the seconds of a pair from stored rounds of both recipes; None without any.

    It includes the rounds' calls and loading, but not the start of a process.
    """
    each = [
        statistics.median(measured)
        for rounds_of_recipe in rounds
        if (
            measured := [
                _seconds(round_) for round_ in rounds_of_recipe if round_.outcome is Outcome.MEASURED
            ]
        )
    ]
    return (_RECIPES + _CANARY) * statistics.mean(each) if each else None


def _seconds(round_: Round) -> float:
    parts = [
        round_.load_s,
        round_.apply_s,
        round_.first_call_s,
        *(sample.total_s for sample in round_.samples),
    ]
    return sum(part for part in parts if part is not None) + sum(round_.warmup_s)


def _minutes(seconds: float) -> int:
    return math.ceil(1.2 * seconds / 60)
