"""Real runs of README's first two lines: does each end with a proven recipe, and how near is it to the best one?

    python -m benchmarks.tuner_runs                     measure what is missing, one run after the other
    python -m benchmarks.tuner_runs --jobs 14           fourteen at once, each on two cores of its own
    python -m benchmarks.tuner_runs --limit-s 540       start no run that would end later; the same command goes on
    python -m benchmarks.tuner_runs --side-by-side      then measure what they proposed in the same rounds

`vivace tune tiny-sd --minutes 4`, twenty times from an empty store and twenty times after `vivace demo`, which is what
`make demo` runs. Each has a store of its own, and is a row of the record when it ends.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.record_files import read_list, write_list, write_text
from benchmarks.tuner_grids import RESULTS
from vivace.foundation.spec.base import Spec

RECORD = RESULTS / "tuner-runs-cpu.json"
PICKS = "tuner-picks-cpu.json"
"""Beside the record: the speed-ups of all that was proposed, measured in the same rounds."""
MODEL, MINUTES, REPEATS = "tiny-sd", 4.0, 20
BAR = 0.8
"""Share of the best proven speed-up that each run should reach."""
Group = Literal["empty", "demo"]
GROUPS: tuple[Group, ...] = ("demo", "empty")
"""The longer runs begin first."""
_CORES_OF_A_RUN = 2
_USUAL_S = {"empty": 60 * MINUTES + 25, "demo": 60 * MINUTES + 160}
_GRACE_S = 240.0
_TOO_LATE = 124  # the exit code of `timeout`


class TunerRun(Spec):
    """One run of `vivace tune`.

    Attributes:
        group: "empty", or "demo" for a store that has the demo's records.
        repeat: of its group, which is also the seed of its choices.
        device: the CPU's name.
        exit_code: of the command.
        recipe, speedup, ci95, verdict, quality, reason, rounds, images: of the pick; None without one.
        baseline_s: seconds of an image of the baseline in the final of the pick.
        trials, seconds: recipes measured, and how long it took.
        demo_s: seconds of the demo before it.
        notes: what the answer says a reader must know.
    """

    group: Group
    repeat: int
    exit_code: int
    device: str | None = None
    recipe: str | None = None
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    verdict: str | None = None
    quality: str | None = None
    reason: str | None = None
    rounds: int | None = None
    images: int | None = None
    baseline_s: float | None = None
    trials: int | None = None
    seconds: float | None = None
    demo_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether it ended with a recipe whose quality passed, and that `vivace bench` calls faster."""
        return self.recipe is not None and self.quality == "passed" and self.verdict == "faster"

    def line(self, rows: Sequence[TunerRun], picks: Picks | None = None) -> str:
        """Return the run in a line: what was picked, beside the best that is proven so far."""
        what = f"{self.group}, run {self.repeat + 1}"
        best, _ = best_proven(rows, picks)
        if self.speedup is None or self.ci95 is None:
            return (
                f"{what}: no recipe (exit {self.exit_code}); {best:.2f}x is proven: {'; '.join(self.notes)}"
            )
        return (
            f"{what}: {self.speedup:.2f}x [{self.ci95[0]:.2f}, {self.ci95[1]:.2f}] {self.recipe}; "
            f"{speedup_of(self, picks) / best:.2f} of {best:.2f}x, the best proven; {self.verdict}, quality "
            f"{self.quality} by {self.images} images; {self.trials} recipes in {self.seconds:.0f} s"
        )


Picks = dict[str, float]
"""Speed-ups by recipe."""
Planned = tuple[Group, int]
"""Group and repeat of a run that is to be made."""
Tunes = Callable[[Planned, Path], tuple[int, dict[str, Any]]]


def missing(rows: Sequence[TunerRun], repeats: int = REPEATS) -> list[Planned]:
    """Return the runs that a record lacks."""
    made = {(row.group, row.repeat) for row in rows}
    return [(group, k) for group in GROUPS for k in range(repeats) if (group, k) not in made]


def tune(of: Planned, folder: Path) -> tuple[int, dict[str, Any]]:
    """Run `vivace tune` with a store of its own; return its exit code and its answer, empty if there is none."""
    group, repeat = of
    vivace = [sys.executable, "-m", "vivace"]
    demo_s = None
    try:
        if group == "demo":
            began = time.monotonic()
            _output(
                [*vivace, "demo", "--store", str(folder / "store"), "-o", str(folder / "demo.html")], 600.0
            )
            demo_s = time.monotonic() - began
        command = [
            *vivace,
            "tune",
            MODEL,
            "--minutes",
            f"{MINUTES:g}",
            "--seed",
            str(repeat),
            "--device",
            "cpu",
        ]
        command += ["--store", str(folder / "store"), "--format", "json"]
        code, output, errors = _output(command, 60 * MINUTES + _GRACE_S)
    except subprocess.TimeoutExpired as error:
        return _TOO_LATE, {"notes": [f"stopped after {error.timeout:g} s"]}
    if not output.strip():
        return code, {"notes": errors.strip().splitlines()[-1:]}
    answer: dict[str, Any] = json.loads(output)
    return code, answer | {"demo_s": demo_s}


def _output(command: Sequence[str], timeout_s: float) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, encoding="utf-8")
    return done.returncode, done.stdout, done.stderr


def row_of(of: Planned, exit_code: int, answer: dict[str, Any]) -> TunerRun:
    """Return the row of a run that has ended."""
    final = answer.get("final", [])
    pick = answer.get("pick")
    picked = next((row for row in final if pick and row["recipe"] == pick["recipe"]), None)
    best: dict[str, Any] = {}
    if picked is not None and picked["speedup"] is not None:
        best = {
            "recipe": picked["recipe"],
            "speedup": picked["speedup"]["ratio"],
            "ci95": picked["speedup"]["ci95"],
            "verdict": picked["speedup"]["verdict"],
            "quality": (picked["quality"] or {}).get("verdict"),
            "reason": (picked["quality"] or {}).get("reason"),
            "rounds": picked["rounds"],
            "images": len(picked["pictures"]),
            "baseline_s": final[0]["latency"]["median_s"],
        }
    return TunerRun(
        group=of[0],
        repeat=of[1],
        exit_code=exit_code,
        device=answer.get("device"),
        trials=answer.get("trials"),
        seconds=answer.get("seconds"),
        demo_s=answer.get("demo_s"),
        notes=tuple(answer.get("notes", ())),
        **best,
    )


def best_proven(rows: Sequence[TunerRun], picks: Picks | None = None) -> tuple[float, str]:
    """Return the highest speed-up that was proven in any run, and its recipe.

    Side by side the fastest recipe is the best. Where that was not measured, a recipe's median over the runs counts, as
    the highest of forty noisy figures is mostly luck.
    """
    by_recipe: dict[str, list[float]] = {}
    for row in rows:
        if row.is_proven and row.recipe is not None:
            by_recipe.setdefault(row.recipe, []).append(speedup_of(row, picks))
    medians = [(statistics.median(speedups), recipe) for recipe, speedups in by_recipe.items()]
    return max(medians, default=(1.0, "baseline"))


def speedup_of(row: TunerRun, picks: Picks | None = None) -> float:
    """Return how many times as fast the proposed recipe is, side by side if that was measured; 1 if none was proven."""
    if not row.is_proven or row.recipe is None or row.speedup is None:
        return 1.0
    return (picks or {}).get(row.recipe, row.speedup)


def shares_of_best(rows: Sequence[TunerRun], picks: Picks | None = None) -> list[float]:
    """Return each run's speed-up relative to the best proven one."""
    best, _ = best_proven(rows, picks)
    return [speedup_of(row, picks) / best for row in rows]


def side_by_side(rows: Sequence[TunerRun]) -> Picks:
    """Measure all proven recipes beside the baseline, in the same rounds."""
    recipes = sorted({row.recipe for row in rows if row.is_proven and row.recipe})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vivace", "bench", "--model", MODEL, "--device", "cpu"]
        command += [part for recipe in ("baseline", *recipes) for part in ("--recipe", recipe)]
        command += ["--rounds", "4", "--repeats", "5", "--no-quality", "--format", "json", "--store", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
    table = json.loads(done.stdout)
    measured = table if isinstance(table, list) else table["rows"]
    return {row["recipe"]: row["speedup"]["ratio"] for row in measured if row["recipe"] in recipes}


def picks_beside(record: Path) -> Picks | None:
    """Return the speed-ups that were measured side by side; None if they were not."""
    path = record.with_name(PICKS)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def in_words(rows: Sequence[TunerRun], picks: Picks | None = None) -> str:
    """Return what the runs gave as a sentence."""
    if not rows:
        return "no runs yet"
    shares = shares_of_best(rows, picks)
    best, recipe = best_proven(rows, picks)
    below = sum(share < BAR for share in shares)
    return (
        f"{sum(row.is_proven for row in rows)} of {len(rows)} runs end with a proven recipe; the best proven is "
        f"{best:.2f}x, `{recipe}`; the runs reach {min(shares):.2f} to {max(shares):.2f} of it, "
        f"{below if below else 'none'} of them less than {BAR:g}"
    )


def pairs_of_cores(jobs: int) -> list[tuple[int, ...]]:
    """Return the cores of each job.

    Raises:
        click.UsageError: there are too few.
    """
    cores = sorted(os.sched_getaffinity(0))
    if jobs > 1 and _CORES_OF_A_RUN * jobs > len(cores):
        raise click.UsageError(
            f"--jobs {jobs}: each has {_CORES_OF_A_RUN} cores, and there are {len(cores)}; give --jobs "
            f"{max(1, len(cores) // _CORES_OF_A_RUN)}"
        )
    return [tuple(cores[_CORES_OF_A_RUN * k : _CORES_OF_A_RUN * (k + 1)]) for k in range(jobs)]


def measure(
    path: Path, limit_s: float | None, jobs: int = 1, repeats: int = REPEATS, tunes: Tunes = tune,
    clock: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """Make the runs that the record lacks, as many at once as there are jobs; return the exit code."""
    ends_at = None if limit_s is None else clock() + limit_s
    rows = read_list(path, TunerRun)
    queue = missing(rows, repeats)
    lock = threading.Lock()

    def due() -> Iterator[Planned]:
        """Yield runs that are expected to end in time."""
        while True:
            with lock:
                fits = (of for of in queue if ends_at is None or clock() + _USUAL_S[of[0]] <= ends_at)
                of = next(fits, None)
                if of is None:
                    return
                queue.remove(of)
            yield of

    def work(cores: Sequence[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and of what it starts
        for of in due():
            with tempfile.TemporaryDirectory() as folder:
                row = row_of(of, *tunes(of, Path(folder)))
            with lock:
                rows.append(row)
                write_list(path, (of_record.model_dump_json() for of_record in rows))
                click.echo(row.line(rows, picks_beside(path)))

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, cores) for cores in pairs_of_cores(jobs)]:
            future.result()
    click.echo(in_words(rows, picks_beside(path)))
    if queue:
        click.echo(f"{len(queue)} runs are left; the same command goes on", err=True)
        return MEASURED_IN_PART
    return 0


@click.command()
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no run that is expected to end later.")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at once, on two cores each."
)
@click.option(
    "--repeats", type=click.IntRange(1), default=REPEATS, show_default=True, help="Runs of each group."
)
@click.option(
    "--side-by-side", "beside", is_flag=True, help="Measure what the runs proposed in the same rounds."
)
def tuner_runs(record: Path, limit_s: float | None, jobs: int, repeats: int, beside: bool) -> int:
    """Run `vivace tune` from empty stores and after the demo, and keep how each run ended."""
    if not beside:
        return measure(record, limit_s, jobs, repeats)
    rows = read_list(record, TunerRun)
    picks = side_by_side(rows)
    write_text(record.with_name(PICKS), json.dumps(picks, indent=2) + "\n")
    for row in rows:
        click.echo(row.line(rows, picks))
    click.echo(in_words(rows, picks))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(tuner_runs))
