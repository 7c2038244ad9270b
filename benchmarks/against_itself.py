"""Compare a recipe with itself, for real: how often do two rounds call it faster or slower than itself?

python -m benchmarks.against_itself             50 comparisons with one core kept busy
python -m benchmarks.against_itself --quiet     50 without
python -m benchmarks.against_itself --number N

Every comparison is a `vivace.bench` of the baseline with itself: two rounds, each in a process of its own,
with one thread, which needs no part of the busy core. The record, results/against-itself.json, is written after each
comparison; the same command goes on. Each case has the machine's load before it: what else ran there shares the cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import run
from vivace.benchmark.studies import start_launcher
from vivace.errors import WorkerError
from vivace.foundation.processes.launcher import Launcher

RESULTS = Path(__file__).parents[1] / "results" / "against-itself.json"
NUMBER = 50

Case = dict[str, Any]


@click.command()
@click.option("--number", default=NUMBER, show_default=True, type=click.IntRange(1))
@click.option("--busy/--quiet", default=True, show_default=True, help="Keep one core busy meanwhile.")
@click.option("--record", default=RESULTS, type=click.Path(path_type=Path))
def command(number: int, busy: bool, record: Path) -> int:
    """Compare, and print how many of the verdicts were faster or slower."""
    cases: list[Case] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    with start_launcher("cpu") as launcher, keep_busy() if busy else nullcontext():
        for _ in range(sum(case["busy"] is busy for case in cases), number):
            load = round(os.getloadavg()[0], 1)
            cases.append({"busy": busy, "load": load, "cores": os.cpu_count()} | compare(launcher))
            record.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n", encoding="utf-8")
            click.echo(json.dumps(cases[-1]))
    these = [case for case in cases if case["busy"] is busy]
    wrong = [case for case in these if case["verdict"] in ("faster", "slower")]
    where = "with one core kept busy" if busy else "with no core kept busy"
    click.echo(f"{where}: {len(wrong)} of {len(these)} called faster or slower than itself")
    return 0


def compare(launcher: Launcher) -> Case:
    """Compare the baseline with itself; return the case.

    Raises:
        WorkerError: a round was not measured.
    """
    with tempfile.TemporaryDirectory() as store:
        compared = vivace.bench(
            "tiny-sd",
            ["baseline", "baseline"],
            num_inference_steps=4,
            timing=vivace.Timing(rounds=2, max_seconds=4, threads=1),
            quality=False,
            device="cpu",
            store=store,
            launcher=launcher,
        )
    baseline, row = compared.rows()
    if baseline.latency is None or row.speedup is None or row.verdict is None:
        raise WorkerError(f"a comparison was not measured: {baseline.reason or row.reason}")
    return {
        "seconds": round(baseline.latency.median.point, 4),
        "ratio": round(row.speedup.point, 4),
        "low": row.speedup.low and round(row.speedup.low, 4),
        "high": row.speedup.high and round(row.speedup.high, 4),
        "verdict": row.verdict.value,
        "cpu_shares": [side.cpu_share and round(side.cpu_share, 3) for side in (baseline, row)],
    }


@contextmanager
def keep_busy() -> Iterator[None]:
    """Keep one core busy with another process."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(run(command))
