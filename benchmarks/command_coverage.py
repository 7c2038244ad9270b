"""How often each command's intervals hold the truth while the machine moves, and how often it is wrong of two equals.

The schedule, the canaries and the statistics are the commands' own; only time and calls are simulated. A part of
`python -m benchmarks.coverage`. A process takes a unit of time, of which 0.3 load the model; a canary takes
half of one.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.benchmark.pairs import samples_of
from vivace.benchmark.places.trial_jobs import CANARY_CALLS, MOST_BETWEEN, Job, rounds_of
from vivace.benchmark.progress import Deadline
from vivace.benchmark.rounds.schedule import missing_rounds
from vivace.evidence.studies.judging import speed_up, spread_of
from vivace.foundation.processes.launcher import Ending
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Outcome, Record, Round, Sample
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Model, Trial
from vivace.foundation.spec.workload import Workload
from vivace.foundation.stats import Interval, LogMean, Verdict, verdict
from vivace.foundation.stats.sequential import DEFAULT_MAX_PAIRS, Decision, decide, looks
from vivace.recipes.resolve import resolve
from vivace.report.host import moves_of
from vivace.report.rows import log_speedups, rows_of

FAIL_IF = 0.03
SLOWDOWNS = (0.0, 0.03, 0.10)
"""True slowdowns of the second recipe of `compare`: none, that which is allowed, and a real
one."""
GAIN = 1.10
PROCESS_SDS = (0.01, 0.03)
LOAD_TIME, CANARY_TIME = 0.3, 0.5
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)

Values = NDArray[np.float64]
Speed = Callable[[Values], Values]
"""From times to the logarithm of how much longer calls take then."""
Move = Callable[[np.random.Generator, float], Speed]
"""Draws a machine, from the duration of a round."""


def _still(generator: np.random.Generator, round_time: float) -> Speed:
    return lambda times: 0.0 * times


def _drift(generator: np.random.Generator, round_time: float) -> Speed:
    slope = 0.02 * generator.standard_normal() / round_time
    return lambda times: slope * times


def _periodic(rounds_long: float, size: float) -> Move:
    def move(generator: np.random.Generator, round_time: float) -> Speed:
        phase = generator.uniform(0, 2 * np.pi)
        return lambda times: np.asarray(
            size * np.sin(2 * np.pi * times / (rounds_long * round_time) + phase), dtype=np.float64
        )

    return move


def _walk(generator: np.random.Generator, round_time: float) -> Speed:
    levels = np.cumsum(0.015 * generator.standard_normal(4000))
    return lambda times: np.asarray(levels[np.asarray(4 * times, dtype=np.int64)])


def _states(generator: np.random.Generator, round_time: float) -> Speed:
    ends = np.cumsum(generator.exponential(3.0, size=500))
    levels = np.asarray(0.06 * generator.integers(0, 2, size=len(ends) + 1), dtype=np.float64)
    return lambda times: levels[np.searchsorted(ends, times)]


def _bursts(generator: np.random.Generator, round_time: float) -> Speed:
    starts = np.cumsum(generator.exponential(8.0, size=200))
    lengths, heights = generator.exponential(0.7, len(starts)), generator.uniform(0.05, 0.25, len(starts))

    def speed(times: Values) -> Values:
        inside = (times[:, None] >= starts) & (times[:, None] < starts + lengths)
        return np.asarray((inside * heights).sum(axis=1))

    return speed


MOVES: dict[str, Move] = {
    "none": _still,
    "drift, 2 % a round": _drift,
    **{
        f"period of {period:g} round{'s' * (period > 1)}, ±{size:.0%}": _periodic(period, size)
        for period, size in itertools.product((0.5, 1, 2, 4), (0.06, 0.12))
    },
    "random walk, 3 % a process": _walk,
    "steps of 6 %, every 3 processes": _states,
    "spikes of 5 to 25 %, every 8 processes": _bursts,
}


@dataclass(frozen=True)
class Design:
    """How a command measures.

    Attributes:
        title: as the page names it.
        rounds: by number of rounds; pairs, at most, of `compare`.
        calls: that a round times.
        short_of_time: the deadline leaves no time for canaries.
    """

    title: str
    recipes: int
    rounds: tuple[int, ...]
    calls: int = 10
    has_deadline: bool = False
    short_of_time: bool = False


DESIGNS = {
    "compare": Design("`compare`", 2, (DEFAULT_MAX_PAIRS,)),
    "bench-2": Design("`bench`, 2 recipes", 2, (2, 4)),
    "bench-5": Design("`bench`, 5 recipes", 5, (2, 4)),
    "final": Design("`tune`'s final", 3, (2, 4), 4, has_deadline=True),
    "short final": Design("`tune`'s final, short of time", 3, (2, 4), 4, True, short_of_time=True),
    "study": Design("`study`, 4 recipes", 4, (2, 4)),
}


class SimulatedMachine:
    """Stands in for the launcher of a command: each request takes simulated time, and its calls what the speed says."""

    def __init__(self, design: Design, move: str, process_sd: float, generator: np.random.Generator) -> None:
        round_time = design.recipes + CANARY_TIME * -(-(design.recipes - 1) // MOST_BETWEEN)
        self.now = 0.0
        self._calls, self._sd, self._generator = design.calls, process_sd, generator
        self._speed = MOVES[move](generator, round_time)

    def run(self, request: Any, limit_s: float, event: Callable[[dict[str, Any]], None]) -> Ending:
        is_canary = request.timing.repeats == CANARY_CALLS
        number, lasts = (CANARY_CALLS, CANARY_TIME) if is_canary else (self._calls, 1.0)
        at = self.now + LOAD_TIME + (lasts - LOAD_TIME) * np.arange(number) / number
        level = self._sd * self._generator.standard_normal()
        calls = np.exp(self._speed(at) + level) * (1 + 0.01 * self._generator.standard_normal(number))
        round_ = Round(
            index=request.round,
            outcome=Outcome.MEASURED,
            started_at=(_BEGAN + timedelta(minutes=self.now)).isoformat(timespec="milliseconds"),
            samples=tuple(
                Sample(picture=0, total_s=float(s), cpu_s=0.0, stages_s={"steps": 0.0}, num_denoiser_calls=1)
                for s in calls
            ),
        )
        self.now += lasts
        return Ending(round_.model_dump())


def measured(
    design: Design, rounds: int, move: str, process_sd: float, generator: np.random.Generator
) -> list[Record]:
    """Return the records of a simulated command, whose recipes are all the baseline once more."""
    machine = SimulatedMachine(design, move, process_sd, generator)
    timing = Timing(rounds=rounds, repeats=design.calls)
    order = missing_rounds([{}] * design.recipes, timing, seed=str(generator.integers(2**62)))
    deadline = None
    if design.has_deadline:
        until = rounds * design.recipes * (1.0 if design.short_of_time else 2.0)
        ones = [1.0] * design.recipes
        deadline = Deadline(until, until, ones, ones, clock=lambda: machine.now - 1e-6)
    trials = tuple(_TRIAL.model_copy(update={"repetition": k}) for k in range(design.recipes))
    job = Job(
        trials=trials,
        rounds=tuple(order),
        timing=timing,
        pictures=None,
        drawn=(True,) * design.recipes,
        canaries=True,
    )
    stored: list[dict[int, Round]] = [{} for _ in trials]
    for done in rounds_of(job, machine, deadline=deadline):  # type: ignore[arg-type]
        stored[done.trial][done.round.index] = done.round
    return [
        Record(trial=trial, environment=_ENVIRONMENT, rounds=tuple(of[i] for i in sorted(of)))
        for trial, of in zip(trials, stored, strict=True)
    ]


def simulate(name: str, rounds: int, move: str, process_sd: float, repeats: int) -> dict[str, float]:
    """Return shares of simulated comparisons.

    `covered`: the 95 % interval of the speed-up holds 1. `false`: a recipe is called faster or slower than itself.
    `power_10`: one that is faster by 10 % is called so.
    """
    design = DESIGNS[name]
    generator = np.random.default_rng(zlib.crc32(repr((name, rounds, move, process_sd)).encode()))
    count = {"covered": 0, "false": 0, "power_10": 0}
    for _ in range(repeats):
        records = measured(design, rounds, move, process_sd, generator)
        interval, outcome, faster = (_of_study if name == "study" else _of_bench)(records)
        assert interval.low is not None
        assert interval.high is not None
        count["covered"] += interval.low <= 1 <= interval.high
        count["false"] += outcome in (Verdict.FASTER, Verdict.SLOWER)
        count["power_10"] += faster is Verdict.FASTER
    return {key: number / repeats for key, number in count.items()}


def _of_bench(records: Sequence[Record]) -> tuple[Interval, Verdict, Verdict]:
    _, ratio, number = log_speedups(records)[0]
    assert ratio is not None
    gained = LogMean(ratio.mean + float(np.log(GAIN)), ratio.error, ratio.dof)
    return ratio.interval(), verdict(ratio, number), verdict(gained, number)


def _of_study(records: Sequence[Record]) -> tuple[Interval, Verdict, Verdict]:
    """A claim of a study is of two of its recipes, neither of which need be the baseline."""
    rows = rows_of(records)
    found = speed_up(rows[1], rows[2], rows[:1], spread_of(rows))
    assert found is not None
    return found.ratio, found.verdict, Verdict.UNCLEAR


def simulate_compare(move: str, process_sd: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield for each true slowdown the shares of comparisons that end with each verdict, and the mean number of pairs.

    `failed`, `passed`, `undecided`: the same with an allowed slowdown of FAIL_IF; `fail_if_pairs` are its pairs.
    """
    design = DESIGNS["compare"]
    generator = np.random.default_rng(zlib.crc32(repr((move, process_sd)).encode()))
    names = (*Verdict, "failed", "passed", "undecided", "pairs", "fail_if_pairs")
    count = {slowdown: dict.fromkeys(map(str, names), 0) for slowdown in SLOWDOWNS}
    for _ in range(repeats):
        records = measured(design, DEFAULT_MAX_PAIRS, move, process_sd, generator)
        times, moves = samples_of(records), moves_of(records)
        assert times is not None
        for slowdown in SLOWDOWNS:
            second = [[seconds * (1 + slowdown) for seconds in of] for of in times[1]]
            for fail_if in (None, FAIL_IF):
                decision = _decision(times[0], second, moves, fail_if)
                word = {True: "failed", False: "passed", None: "undecided"}[decision.regressed]
                count[slowdown][str(decision.verdict) if fail_if is None else word] += 1
                count[slowdown]["pairs" if fail_if is None else "fail_if_pairs"] += decision.num_pairs
    for slowdown, of in count.items():
        yield {"slowdown": slowdown} | {key: number / repeats for key, number in of.items()}


def _decision(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    moves: Sequence[float],
    fail_if: float | None,
) -> Decision:
    """Return the decision that ends `compare`, which looks as it does."""
    steps = looks(DEFAULT_MAX_PAIRS)
    for number in steps:
        decision = decide(first[:number], second[:number], len(steps) + 1, fail_if, moves[:number])
        if decision.is_final:
            break
    return decision


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each command that compares, movement and spread of processes."""
    for name, move, process_sd in itertools.product(DESIGNS, MOVES, PROCESS_SDS):
        for rounds in () if name == "compare" else DESIGNS[name].rounds:
            shares = simulate(name, rounds, move, process_sd, repeats)
            yield {"command": name, "move": move, "process_sd": process_sd, "rounds": rounds} | shares


def compare_cases(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each movement, spread of processes and true slowdown of `compare`."""
    for move, process_sd in itertools.product(MOVES, PROCESS_SDS):
        for row in simulate_compare(move, process_sd, repeats):
            yield {"move": move, "process_sd": process_sd} | row


_TRIAL = Trial(
    model=Model(name="tiny-sd", source="embedded", revision="0" * 16),
    recipe=resolve("baseline").spec,
    workload=Workload(
        prompts=("a red circle",),
        seeds=(0,),
        height=128,
        width=128,
        num_inference_steps=25,
        guidance_scale=4.0,
    ),
    device="cpu",
)
_ENVIRONMENT = Environment(
    vivace="0", source_revision=None, platform="", python="", device="cuda", device_name="", device_capability=None,
    driver=None, cpu="", num_cores=2, num_threads=1, memory_bytes=1, libraries={}, variables={},
)  # fmt: skip
