"""How often intervals hold what they should, and how often verdicts are wrong: simulated rounds of known truth.

python -m benchmarks.coverage             simulate, write results/coverage.json
python -m benchmarks.coverage --repeats N comparisons of each case (1000: ±1.4 points at 95 %)
python -m benchmarks.coverage --only rounds    a part: `rounds`, `commands` or `pairs` (of `compare`)
python -m benchmarks.coverage --only commands --repeats 100    as recorded, and `pairs` too

`rounds`: two or five recipes are compared. Each recipe gets its own process in each round, and processes that do the
same differ by PROCESS_SDS; the machine's speed differs from round to round, for all recipes alike. Within a process the
calls vary by one of NOISES. The other parts simulate whole commands while the machine moves within rounds.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import command_coverage
from benchmarks.command import run
from benchmarks.noises import MACHINE_SD, NOISES, PROCESS_SDS, draw_round
from vivace.foundation.stats import Verdict, learn_spread, log_speedup, median_interval, verdict

RESULTS = Path(__file__).parents[1] / "results" / "coverage.json"
RECIPES = (2, 5)
ROUNDS = (1, 2, 3, 6)
SAMPLES: tuple[int | None, ...] = (4, 10, None)
"""Timed calls of a round; None: as many as the stopping rule asks for, MOST at most."""
GAINS = (1.0, 1.03, 1.10)
"""True speed-ups."""


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
        quiet = [[draw_round(NOISES[noise], generator, samples) * level for level in of] for of in levels]
        # Times are told of a machine whose speed stays.
        mean = median_interval(quiet[0], learn_spread([dict(enumerate(of)) for of in quiet]))
        truth = float(levels[0][0]) if rounds == 1 else 1.0
        count["latency"] += bool(mean.low and mean.high and mean.low <= truth <= mean.high)
        truth = float(levels[0][0] / levels[1][0]) if rounds == 1 else 1.0
        times = [[r * speed for r, speed in zip(of, machine, strict=True)] for of in quiet]
        spread = learn_spread([dict(enumerate(of)) for of in times])
        for gain in GAINS:
            ratio = log_speedup(times[0], [r / gain for r in times[1]], spread)
            outcome = verdict(ratio, rounds)
            if gain == 1:
                interval = ratio.interval()
                count["speedup"] += bool(
                    interval.low and interval.high and interval.low <= truth <= interval.high
                )
                count["false"] += outcome in (Verdict.FASTER, Verdict.SLOWER)
            else:
                count[f"power_{round(100 * (gain - 1))}"] += outcome is Verdict.FASTER
    return {name: number / repeats for name, number in count.items()}


@click.command()
@click.option("--repeats", default=1000, show_default=True, type=click.IntRange(10))
@click.option(
    "--only",
    type=click.Choice(["rounds", "commands", "pairs"]),
    help="Simulate one part, and keep the others.",
)
@click.option("--record", default=RESULTS, type=click.Path(path_type=Path))
def command(repeats: int, only: str | None, record: Path) -> int:
    """Simulate every case and write the record."""
    contents = json.loads(record.read_text(encoding="utf-8")) if only is not None and record.exists() else {}
    if only in (None, "rounds"):
        contents |= {"repeats": repeats, "rows": _rounds(repeats)}
    if only in (None, "commands"):
        contents |= {"command_repeats": repeats, "commands": list(_told(command_coverage.cases(repeats)))}
    if only in (None, "pairs"):
        contents |= {"pair_repeats": repeats, "pairs": list(_told(command_coverage.compare_cases(repeats)))}
    parts = [f'"{name}": {_written(value)}' for name, value in contents.items()]
    record.write_text("{" + ", ".join(parts) + "}\n", encoding="utf-8")
    return 0


def _written(value: object) -> str:
    """Return JSON with one row a line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"


def _rounds(repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for noise, process_sd, recipes in itertools.product(NOISES, PROCESS_SDS, RECIPES):
        for rounds, samples in itertools.product(ROUNDS, SAMPLES):
            case = {"noise": noise, "process_sd": process_sd, "recipes": recipes, "rounds": rounds}
            shares = simulate(noise, recipes, rounds, samples, process_sd, repeats)
            rows.append(case | {"samples": samples} | shares)
        click.echo(_line(rows[-len(ROUNDS) * len(SAMPLES) :]))
    return rows


def _told(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        click.echo(json.dumps(row))
        yield row


def _line(rows: Sequence[dict[str, object]]) -> str:
    parts = []
    for rounds in ROUNDS:
        of = [row for row in rows if row["rounds"] == rounds]
        least, false = (
            choose(float(str(row[name])) for row in of) for choose, name in ((min, "speedup"), (max, "false"))
        )
        parts.append(f"{rounds}: covers {least:.1%} or more, wrong {false:.1%} or less")
    case = rows[0]
    return (
        f"{case['noise']}; processes ±{case['process_sd']:.0%}; {case['recipes']} recipes; rounds "
        + "; ".join(parts)
    )


if __name__ == "__main__":
    raise SystemExit(run(command))
