"""How often intervals hold what they should, and how often verdicts are wrong: simulated rounds of known truth.

python -m benchmarks.coverage             simulate, write results/coverage.json
python -m benchmarks.coverage --repeats N comparisons of each case (1000: ±1.4 points at 95 %)

A study compares two or five recipes. Each recipe gets its own process in each round, and processes that do the same
differ by PROCESS_SDS; the machine's speed differs from round to round, for all recipes alike. Within a process the
calls vary by one of NOISES.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.command import run
from vivace.stats import Verdict, enough_samples, learn_spread, log_speedup, median_interval, verdict

RESULTS = Path(__file__).parents[1] / "results" / "coverage.json"
RECIPES = (2, 5)
ROUNDS = (1, 2, 3, 6)
SAMPLES: tuple[int | None, ...] = (4, 10, None)
"""Timed calls of a round; None: as many as the stopping rule asks for, MOST at most."""
MOST = 30
PROCESS_SDS = (0.0, 0.01, 0.03)
MACHINE_SD = 0.05
GAINS = (1.0, 1.03, 1.10)
"""True speed-ups."""

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]


def _gaussian(generator: np.random.Generator, number: int) -> Values:
    return 1 + 0.01 * generator.standard_normal(number)


def _skewed(generator: np.random.Generator, number: int) -> Values:
    return np.asarray(1 + 0.02 * (generator.exponential(size=number) - np.log(2)))


def _spiky(generator: np.random.Generator, number: int) -> Values:
    return _gaussian(generator, number) * np.where(generator.random(number) < 0.05, 1.5, 1.0)


def _autocorrelated(generator: np.random.Generator, number: int) -> Values:
    steps = 0.01 * np.sqrt(1 - 0.7**2) * generator.standard_normal(number)
    value, found = 0.01 * generator.standard_normal(), []
    for step in steps:
        value = 0.7 * value + step
        found.append(1 + value)
    return np.asarray(found)


def _drifting(generator: np.random.Generator, number: int) -> Values:
    slope = 0.02 * generator.standard_normal()
    return _gaussian(generator, number) * (1 + slope * (np.arange(number) / MOST - 0.5))


NOISES: dict[str, Draw] = {
    "Gaussian, 1 %": _gaussian,
    "skewed, 2 %": _skewed,
    "spikes of 50 %, one call in twenty": _spiky,
    "autocorrelated (0.7), 1 %": _autocorrelated,
    "drifting, 2 % over 30 calls": _drifting,
}


def simulate(
    noise: str, recipes: int, rounds: int, samples: int | None, process_sd: float, repeats: int
) -> dict[str, float]:
    """Return the shares of simulated comparisons.

    `latency`: the 95 % interval of the time covers the truth; for one round that is the time of its own process.
    `speedup`: the same for the speed-up; for one round, that of its two processes. `false`: a recipe is called faster
    or slower than itself. `power_3`, `power_10`: a gain of 3 or 10 % is called faster.
    """
    case = (noise, recipes, rounds, samples, process_sd)
    generator = np.random.default_rng(zlib.crc32(repr(case).encode()))
    count = {"latency": 0, "speedup": 0, "false": 0, "power_3": 0, "power_10": 0}
    for _ in range(repeats):
        machine = np.exp(MACHINE_SD * generator.standard_normal(rounds))
        levels = np.exp(process_sd * generator.standard_normal((recipes, rounds)))
        quiet = [[_round(NOISES[noise], generator, samples) * level for level in of] for of in levels]
        # Times are told of a machine whose speed stays.
        found = median_interval(quiet[0], learn_spread([dict(enumerate(of)) for of in quiet]))
        truth = float(levels[0][0]) if rounds == 1 else 1.0
        count["latency"] += bool(found.low and found.high and found.low <= truth <= found.high)
        truth = float(levels[0][0] / levels[1][0]) if rounds == 1 else 1.0
        times = [[r * speed for r, speed in zip(of, machine, strict=True)] for of in quiet]
        spread = learn_spread([dict(enumerate(of)) for of in times])
        for gain in GAINS:
            ratio = log_speedup(times[0], [r / gain for r in times[1]], spread)
            judged = verdict(ratio, rounds)
            if gain == 1:
                interval = ratio.interval()
                count["speedup"] += bool(
                    interval.low and interval.high and interval.low <= truth <= interval.high
                )
                count["false"] += judged in (Verdict.FASTER, Verdict.SLOWER)
            else:
                count[f"power_{round(100 * (gain - 1))}"] += judged is Verdict.FASTER
    return {name: number / repeats for name, number in count.items()}


def _round(draw: Draw, generator: np.random.Generator, samples: int | None) -> Values:
    drawn = draw(generator, MOST if samples is None else samples)
    if samples is not None:
        return drawn
    for number in range(6, MOST):
        if enough_samples(list(2 * drawn[:number])):
            return drawn[:number]
    return drawn


@click.command()
@click.option("--repeats", default=1000, show_default=True, type=click.IntRange(10))
@click.option("--record", default=RESULTS, type=click.Path(path_type=Path))
def command(repeats: int, record: Path) -> int:
    """Simulate every case and write the record."""
    rows: list[dict[str, object]] = []
    for noise, process_sd, recipes in itertools.product(NOISES, PROCESS_SDS, RECIPES):
        for rounds, samples in itertools.product(ROUNDS, SAMPLES):
            case = {"noise": noise, "process_sd": process_sd, "recipes": recipes, "rounds": rounds}
            shares = simulate(noise, recipes, rounds, samples, process_sd, repeats)
            rows.append(case | {"samples": samples} | shares)
        click.echo(_line(rows[-len(ROUNDS) * len(SAMPLES) :]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    record.write_text(f'{{"repeats": {repeats}, "rows": [\n{lines}\n]}}\n')
    return 0


def _line(rows: Sequence[dict[str, object]]) -> str:
    told = []
    for rounds in ROUNDS:
        of = [row for row in rows if row["rounds"] == rounds]
        least, false = (
            choose(float(str(row[name])) for row in of) for choose, name in ((min, "speedup"), (max, "false"))
        )
        told.append(f"{rounds}: covers {least:.1%} or more, wrong {false:.1%} or less")
    case = rows[0]
    return (
        f"{case['noise']}; processes ±{case['process_sd']:.0%}; {case['recipes']} recipes; rounds "
        + "; ".join(told)
    )


if __name__ == "__main__":
    raise SystemExit(run(command))
