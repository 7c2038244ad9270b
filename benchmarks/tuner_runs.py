"""Twenty real runs of `vivace tune`: does each end with a proven recipe, and how near is it to the best one?

    python -m benchmarks.tuner_runs                  measure what is missing, about 90 minutes on two cores
    python -m benchmarks.tuner_runs --limit-s 3000   start no run after so many seconds; the same command goes on
    python -m benchmarks.tuner_runs --side-by-side   then measure what they proposed in the same rounds, ten minutes

tiny-sd for 2, 4 and 8 minutes and tiny-flux for 4, five times each with a fresh store. In two of the four groups one
run is beside a core that this script keeps busy. Runs follow each other; each is a row of the record when it ends.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.record_files import read_list, write_list
from benchmarks.tuner_grids import RESULTS
from vivace.foundation.spec.base import Spec

RECORD = RESULTS / "tuner-runs-cpu.json"
PICKS = "tuner-picks-cpu.json"
"""Beside the record: the speed-ups of all that was proposed, measured in the same rounds."""
REPEATS = 5
GROUPS = (("tiny-sd", 2.0), ("tiny-sd", 4.0), ("tiny-sd", 8.0), ("tiny-flux", 4.0))
"""Models and minutes."""
BUSY_GROUPS = frozenset({("tiny-sd", 4.0), ("tiny-flux", 4.0)})
"""The last run of these is beside a busy core."""
_GRACE_S = 120.0
_TOO_LATE = 124  # the exit code of `timeout`
_SPIN = "while True: pass"
Picks = dict[str, dict[str, float]]
"""Speed-ups by model and recipe."""


class TunerRun(Spec):
    """One run of `vivace tune`.

    Attributes:
        repeat: of its group, which is also the seed of its choices; `beside` is the number of busy cores.
        device: the CPU's name.
        exit_code: of the command.
        recipe, speedup, ci95, verdict, quality, reason, rounds, images: of the pick; None without one.
        baseline_s: seconds of an image of the baseline in the final of the pick.
        trials, seconds: recipes measured, and how long it took.
        notes: what the answer says a reader must know.
    """

    model: str
    minutes: float
    repeat: int
    beside: int
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
    notes: tuple[str, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether it ended with a recipe whose quality passed, and that is faster by two rounds or more."""
        return (
            self.recipe is not None
            and self.quality == "passed"
            and self.ci95 is not None
            and self.ci95[0] > 1
            and (self.rounds or 0) >= 2
        )

    @property
    def line(self) -> str:
        """The run in a line."""
        beside = " beside a busy core" if self.beside else ""
        what = f"{self.model}, {self.minutes:g} min, run {self.repeat + 1}{beside}"
        if not self.is_proven or self.speedup is None or self.ci95 is None:
            return f"{what}: nothing proven (exit {self.exit_code}): {'; '.join(self.notes)}"
        return (
            f"{what}: {self.speedup:.2f}x [{self.ci95[0]:.2f}, {self.ci95[1]:.2f}] with {self.recipe}, "
            f"{self.images} images, {self.trials} recipes in {self.seconds:.0f} s"
        )


@dataclass(frozen=True)
class Planned:
    """A run that is to be made."""

    model: str
    minutes: float
    repeat: int
    beside: int

    def is_made(self, rows: Sequence[TunerRun]) -> bool:
        """Whether the record has it."""
        return any(
            (row.model, row.minutes, row.repeat) == (self.model, self.minutes, self.repeat) for row in rows
        )


def planned() -> list[Planned]:
    """Return all runs, the first of every group first."""
    return [
        Planned(model, minutes, repeat, int((model, minutes) in BUSY_GROUPS and repeat == REPEATS - 1))
        for repeat in range(REPEATS)
        for model, minutes in GROUPS
    ]


def tune(of: Planned, folder: Path) -> tuple[int, dict[str, Any]]:
    """Run `vivace tune` with a store of its own; return its exit code and its answer, empty if there is none."""
    command = [sys.executable, "-m", "vivace", "tune", of.model, "--minutes", f"{of.minutes:g}"]
    command += [
        "--seed",
        str(of.repeat),
        "--device",
        "cpu",
        "--store",
        str(folder / "store"),
        "--format",
        "json",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120 * of.minutes + _GRACE_S, encoding="utf-8"
        )
    except subprocess.TimeoutExpired as error:
        return _TOO_LATE, {"notes": [f"stopped after {error.timeout:g} s"]}
    if not done.stdout.strip():
        return done.returncode, {"notes": done.stderr.strip().splitlines()[-1:]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keep cores busy meanwhile."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


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
        model=of.model,
        minutes=of.minutes,
        repeat=of.repeat,
        beside=of.beside,
        exit_code=exit_code,
        device=answer.get("device"),
        trials=answer.get("trials"),
        seconds=answer.get("seconds"),
        notes=tuple(answer.get("notes", ())),
        **best,
    )


def best_proven(model: str, rows: Sequence[TunerRun], picks: Picks | None = None) -> tuple[float, str]:
    """Return the highest speed-up that was proven anywhere, and its recipe: by these runs, or by a recorded search.

    Side by side the fastest recipe is the best. Where that was not measured, a recipe's median over the runs counts, as
    the highest of twenty noisy figures is mostly luck.
    """
    if picks and model in picks:
        return max((speedup, recipe) for recipe, speedup in picks[model].items())
    by_recipe: dict[str, list[float]] = {}
    for row in rows:
        if row.model == model and row.is_proven and row.recipe is not None and row.speedup is not None:
            by_recipe.setdefault(row.recipe, []).append(row.speedup)
    medians = [(statistics.median(speedups), recipe) for recipe, speedups in by_recipe.items()]
    recorded = RESULTS / f"tune-{model}.json"
    if recorded.exists():
        medians += [
            (row["speedup"]["ratio"], row["recipe"])
            for row in json.loads(recorded.read_text(encoding="utf-8"))["final"]
            if row["speedup"] is not None and (row["quality"] or {}).get("verdict") == "passed"
        ]
    return max(medians, default=(1.0, "baseline"))


def speedup_of(row: TunerRun, picks: Picks | None = None) -> float:
    """Return how many times as fast the proposed recipe is, side by side if that was measured; 1 if none was proven."""
    if not row.is_proven or row.recipe is None or row.speedup is None:
        return 1.0
    return (picks or {}).get(row.model, {}).get(row.recipe, row.speedup)


def summary(rows: Sequence[TunerRun], picks: Picks | None = None) -> dict[str, Any]:
    """Return the share of runs that are proven, and for each model the median gain relative to the best."""
    models = list(dict.fromkeys(row.model for row in rows))
    relative: dict[str, list[float]] = {}
    for model in models:
        best, _ = best_proven(model, rows, picks)
        relative[model] = [speedup_of(row, picks) / best for row in rows if row.model == model]
    every = [share for shares in relative.values() for share in shares]
    return {
        "runs": len(rows),
        "proven": sum(row.is_proven for row in rows),
        "median_of_best": statistics.median(every) if every else None,
        "by_model": {model: statistics.median(shares) for model, shares in relative.items()},
    }


def side_by_side(rows: Sequence[TunerRun]) -> Picks:
    """Measure all proven recipes of each model beside its baseline, in the same rounds."""
    picks: Picks = {}
    for model in dict.fromkeys(row.model for row in rows):
        recipes = sorted({row.recipe for row in rows if row.model == model and row.is_proven and row.recipe})
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "vivace", "bench", "--model", model, "--device", "cpu"]
            command += [part for recipe in ("baseline", *recipes) for part in ("--recipe", recipe)]
            command += [
                "--rounds",
                "4",
                "--repeats",
                "6",
                "--no-quality",
                "--format",
                "json",
                "--store",
                folder,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
        table = json.loads(done.stdout)
        picks[model] = {
            row["recipe"]: row["speedup"]["ratio"] for row in _rows(table) if row["recipe"] in recipes
        }
    return picks


def _rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of the JSON of `vivace bench`."""
    return table if isinstance(table, list) else table["rows"]


def picks_beside(record: Path) -> Picks | None:
    """Return the speed-ups that were measured side by side; None if they were not."""
    path = record.with_name(PICKS)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def in_words(rows: Sequence[TunerRun], picks: Picks | None = None) -> str:
    """Return the summary as a sentence."""
    shares = summary(rows, picks)
    if not rows:
        return "no runs yet"
    each = ", ".join(f"{model} {share:.2f}" for model, share in shares["by_model"].items())
    return (
        f"{shares['proven']} of {shares['runs']} runs end with a proven recipe; the median speed-up is "
        f"{shares['median_of_best']:.2f} of the best that was proven anywhere ({each})"
    )


def measure(
    path: Path,
    limit_s: float | None,
    tunes: Callable[[Planned, Path], tuple[int, dict[str, Any]]] = tune,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Make the runs that the record lacks; return the exit code."""
    began = clock()
    rows = read_list(path, TunerRun)
    for of in planned():
        if of.is_made(rows):
            continue
        if limit_s is not None and clock() - began >= limit_s:
            click.echo(
                f"{limit_s:g} s are over; the same command goes on with {of.model}, {of.minutes:g} min",
                err=True,
            )
            return MEASURED_IN_PART
        with tempfile.TemporaryDirectory() as folder, busy_cores(of.beside):
            row = row_of(of, *tunes(of, Path(folder)))
        rows.append(row)
        write_list(path, (searched.model_dump_json() for searched in rows))
        click.echo(row.line)
    click.echo(in_words(rows, picks_beside(path)))
    return 0


@click.command()
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no run after this many seconds.")
@click.option(
    "--side-by-side", "beside", is_flag=True, help="Measure what the runs proposed in the same rounds."
)
def tuner_runs(record: Path, limit_s: float | None, beside: bool) -> int:
    """Run `vivace tune` twenty times and keep how each run ended."""
    if beside:
        rows = read_list(record, TunerRun)
        picks = side_by_side(rows)
        record.with_name(PICKS).write_text(json.dumps(picks, indent=2) + "\n", encoding="utf-8")
        click.echo(in_words(rows, picks))
        return 0
    return measure(record, limit_s)


if __name__ == "__main__":
    raise SystemExit(run(tuner_runs))
