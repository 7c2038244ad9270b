"""How often a recipe is called faster or slower than itself while the machine moves within rounds.

The machine's speed is a function of time here, not one number a round. A process takes a unit of time, a canary half of
one. Two designs are compared: the fixed order of earlier versions (A B, B A), which assumed that a round stands still,
and a random order with the baseline at both ends of the round, as `vivace bench` measures now.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.noises import PROCESS_SDS
from vivace.benchmark.places.trial_jobs import BETWEEN_BASELINES, CANARY_CALLS
from vivace.benchmark.schedule import order_within
from vivace.foundation.stats import Levels, Verdict, learn_spread, level_at, log_speedup, verdict

RECIPES, ROUNDS = (2, 5), (2, 4, 6)
SAMPLES = 10
DESIGNS = ("fixed order", "canaries")
GAIN = 1.10
CANARY_TIME = 0.5

Values = NDArray[np.float64]
Speed = Callable[[Values], Values]
"""From times to the logarithm of how much longer calls take then."""
Move = Callable[[np.random.Generator, float, int], Speed]
"""Draws a machine, from the duration of a round and their number."""


def _still(generator: np.random.Generator, round_time: float, rounds: int) -> Speed:
    levels = 0.05 * generator.standard_normal(rounds)
    return lambda times: levels[np.minimum(times / round_time, rounds - 1).astype(int)]


def _periodic(rounds_long: float, size: float = 0.05) -> Move:
    def move(generator: np.random.Generator, round_time: float, rounds: int) -> Speed:
        phase = generator.uniform(0, 2 * np.pi)

        def speed(times: Values) -> Values:
            turns = times / (rounds_long * round_time)
            return np.asarray(size * np.sin(2 * np.pi * turns + phase), dtype=np.float64)

        return speed

    return move


def _states(generator: np.random.Generator, round_time: float, rounds: int) -> Speed:
    ends = np.cumsum(generator.exponential(3.0, size=20 + int(round_time * rounds)))
    levels = np.asarray(0.06 * generator.integers(0, 2, size=len(ends) + 1), dtype=np.float64)
    return lambda times: levels[np.searchsorted(ends, times)]


def _bursts(generator: np.random.Generator, round_time: float, rounds: int) -> Speed:
    starts = np.cumsum(generator.exponential(8.0, size=20 + int(round_time * rounds)))
    lengths, heights = generator.exponential(0.7, len(starts)), generator.uniform(0.05, 0.25, len(starts))

    def speed(times: Values) -> Values:
        inside = (times[:, None] >= starts) & (times[:, None] < starts + lengths)
        return np.asarray((inside * heights).sum(axis=1))

    return speed


MOVES: dict[str, Move] = {
    "5 % from round to round": _still,
    "drift of ±5 %, period of two rounds": _periodic(2.0),
    "drift of ±10 %, period of two rounds": _periodic(2.0, 0.10),
    "drift of ±5 %, period of three rounds": _periodic(3.0),
    "drift of ±5 %, period of one round": _periodic(1.0),
    "clock states 6 % apart, for 3 processes": _states,
    "bursts of 5 to 25 %, every 8 processes": _bursts,
}


def order_of(design: str, recipes: int, index: int, seed: str) -> list[int | None]:
    """Return who is measured in a round; None is a canary of the baseline, which is 0."""
    order = order_within(recipes, index, None if design == "fixed order" else seed)
    if design == "fixed order":
        return list(order)
    others = [trial for trial in order if trial]
    between: list[int | None] = []
    for k, trial in enumerate(others):
        if k and k % BETWEEN_BASELINES == 0:
            between.append(None)
        between.append(trial)
    return [0, *between, None] if order[0] == 0 else [None, *between, 0]


def simulate(
    move: str, design: str, recipes: int, rounds: int, process_sd: float, repeats: int
) -> dict[str, float]:
    """Return the shares of comparisons that call a recipe faster or slower than itself, and a gain of 10 % faster."""
    case = (move, recipes, rounds, process_sd)
    generator = np.random.default_rng(zlib.crc32(repr(case).encode()))
    order = random.Random(repr(case))
    count = {"false": 0, "power_10": 0}
    for _ in range(repeats):
        seed = str(order.random())
        plan = [order_of(design, recipes, index, seed) for index in range(rounds)]
        longest = max(sum(CANARY_TIME if trial is None else 1 for trial in of) for of in plan)
        speed = MOVES[move](generator, longest, rounds)
        for gain in (1.0, GAIN):
            outcome = _verdict(plan, speed, generator, process_sd, gain, recipes)
            if gain == 1:
                count["false"] += outcome in (Verdict.FASTER, Verdict.SLOWER)
            else:
                count["power_10"] += outcome is Verdict.FASTER
    return {name: number / repeats for name, number in count.items()}


def _verdict(
    plan: Sequence[Sequence[int | None]],
    speed: Speed,
    generator: np.random.Generator,
    process_sd: float,
    gain: float,
    recipes: int,
) -> Verdict:
    times: list[dict[int, list[float]]] = [{} for _ in range(recipes)]
    beside: list[list[float]] = []
    moves: list[float] = []
    now = 0.0
    for index, of in enumerate(plan):
        points: Levels = []
        started = {}
        for trial in of:
            number, lasts = (CANARY_CALLS, CANARY_TIME) if trial is None else (SAMPLES, 1.0)
            at = now + lasts * np.arange(number) / number
            level = process_sd * generator.standard_normal() - (np.log(gain) if trial == 1 else 0.0)
            calls = np.exp(speed(at) + level) * (1 + 0.01 * generator.standard_normal(number))
            if trial is not None:
                times[trial][index] = list(calls)
                started[trial] = now
            if not trial:
                points.append((now, float(np.log(np.median(calls)))))
            now += lasts
        moves += [later - earlier for (_, earlier), (_, later) in itertools.pairwise(points)]
        own = float(np.log(np.median(times[0][index])))
        beside.append(list(np.asarray(times[0][index]) * np.exp(level_at(points, started[1]) - own)))
    spread = learn_spread(times, moves=moves)
    ratio = log_speedup(beside, [times[1][index] for index in range(len(plan))], spread)
    return verdict(ratio, len(plan))


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    for move, process_sd, recipes, rounds in itertools.product(MOVES, PROCESS_SDS, RECIPES, ROUNDS):
        row: dict[str, Any] = {
            "move": move, "process_sd": process_sd, "recipes": recipes, "rounds": rounds
        }  # fmt: skip
        for design in DESIGNS:
            row[design] = simulate(move, design, recipes, rounds, process_sd, repeats)
        yield row
