"""Compare a recipe with itself, for real: how often do two rounds call it faster or slower than itself?

python -m benchmarks.against_itself             50 comparisons on a quiet machine, then 50 with one core kept busy
python -m benchmarks.against_itself --number N

Every comparison runs as `vivace bench` runs it: two rounds (A B, B A), each in a process of its own, timed until there
are enough samples. The record, results/against-itself.json, is written after each comparison; the same command goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from benchmarks.command import run
from vivace.benchmark import Timing
from vivace.benchmark.comparison import comparison_of, default_threads
from vivace.benchmark.launcher import Launcher
from vivace.benchmark.requests import RoundRequest
from vivace.benchmark.runner import ask_environment
from vivace.benchmark.studies import start_launcher
from vivace.errors import WorkerError
from vivace.report.rows import rows_of
from vivace.spec.environment import Environment
from vivace.spec.record import Record, Round
from vivace.spec.trial import Trial

RESULTS = Path(__file__).parents[1] / "results" / "against-itself.json"
MODEL = "tiny-sd"
STEPS = 4
NUMBER = 50
_ORDERS = ("AB", "BA")

Case = dict[str, Any]


@click.command()
@click.option("--number", default=NUMBER, show_default=True, type=click.IntRange(1))
@click.option("--record", default=RESULTS, type=click.Path(path_type=Path))
def command(number: int, record: Path) -> int:
    """Compare, and print how many of the verdicts were faster or slower."""
    cases: list[Case] = json.loads(record.read_text()) if record.exists() else []
    comparison = comparison_of(MODEL, "baseline", num_inference_steps=STEPS)
    timing = Timing(threads=default_threads(comparison.found), max_seconds=5)
    with start_launcher("cpu") as launcher:
        environment = ask_environment(launcher, "cpu", timing.threads)
        trial = Trial(
            model=comparison.found.model,
            recipe=comparison.recipes[0].spec,
            workload=comparison.workload,
            device="cpu",
        )
        for busy in (False, True):
            with _keep_busy() if busy else nullcontext():
                for _ in range(sum(case["busy"] is busy for case in cases), number):
                    cases.append({"busy": busy} | _compare(launcher, trial, timing, environment))
                    record.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
            these = [case for case in cases if case["busy"] is busy]
            wrong = [case for case in these if case["verdict"] in ("faster", "slower")]
            where = "with one core kept busy" if busy else "on a quiet machine"
            click.echo(f"{where}: {len(wrong)} of {len(these)} called faster or slower than itself")
    return 0


def _compare(launcher: Launcher, trial: Trial, timing: Timing, environment: Environment) -> Case:
    """Return the row of a recipe compared with itself."""
    rounds: dict[str, list[Round]] = {"A": [], "B": []}
    for index, order in enumerate(_ORDERS):
        for name in order:
            rounds[name].append(_round(launcher, trial, timing, index))
    baseline, row = rows_of(
        [Record(trial=trial, environment=environment, rounds=tuple(rounds[name])) for name in ("A", "B")]
    )
    assert baseline.latency is not None
    assert row.speedup is not None
    assert row.verdict is not None
    return {
        "seconds": round(baseline.latency.median.point, 4),
        "ratio": round(row.speedup.point, 4),
        "low": row.speedup.low and round(row.speedup.low, 4),
        "high": row.speedup.high and round(row.speedup.high, 4),
        "verdict": row.verdict.value,
        "cpu_shares": [one.cpu_share and round(one.cpu_share, 3) for one in (baseline, row)],
    }


def _round(launcher: Launcher, trial: Trial, timing: Timing, index: int) -> Round:
    # Only round 0 keeps images, and they are the same each time.
    request = RoundRequest(trial=trial, round=index + 1, timing=timing, pictures="", threads=timing.threads)
    ending = launcher.run(request, timing.timeout_s)
    if ending.value is None:
        raise WorkerError(f"a round ended without a result: {ending.log[-200:]}")
    return Round.model_validate(ending.value)


@contextmanager
def _keep_busy() -> Iterator[None]:
    """Keep one core busy with another process."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(run(command))
