"""Measure every technique that keeps the image, one at a time, each beside its baseline.

    python -m benchmarks.every_technique sd15 --limit-s 500      measure what is missing, until the time limit
    python -m benchmarks.every_technique sd15 --compile 4        only compile, four recipes at a time, and time that
    python -m benchmarks.every_technique sd15 --best 5           the five fastest again, at full length
    python -m benchmarks.every_technique sd15 --only int8+compile --steps 50    this recipe, at full length

The model has random weights and its native size. Single techniques are timed over eight steps, which
docs/techniques-measured.md scales to the model's number of steps; the best recipes, and FLUX's ten configurations of a
published study, are timed at full length. A row is two rounds of the recipe beside two rounds of its baseline, each in
a process of its own; up to three recipes share a baseline (A B C D D C B A). Each group is added to the record at once,
and the same command resumes with what is missing, was timed too seldom, or was measured while the host's speed changed.
What one GPU has measured is not measured again on another. On a host of several GPUs, start one such command a GPU with
its own cores, CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 python -m ...: they may write the same record.

The eager steps of UNets are bound by the CPU that launches kernels, so such rows would measure the host. Their baseline
is `cuda_graph`, and every recipe that goes with it has it too.

`--compile` fills the compiler's disk cache, so that timing does not wait for it. The first calls are kept in a separate
record, since processes that compile in parallel disturb each other.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

import vivace
from benchmarks.command import MEASURED_IN_PART, Measuring, measures, run
from benchmarks.every_model import line
from benchmarks.technique_cases import (
    COMMON,
    FAMILIES,
    STEPS,
    Key,
    baseline,
    cases,
    first_calls_file,
    full_length,
    record_file,
)
from benchmarks.technique_records import (
    add,
    add_group,
    key_of,
    num_timed,
    read_records,
    rows_with_baselines,
    with_baselines,
)
from vivace.benchmark import Timing, studies
from vivace.cli.display.progress_display import for_this_terminal
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats.intervals import MIN_SAMPLES
from vivace.models.find import SYNTHETIC
from vivace.report.rows import Row, rows_of

ROUNDS = 2
MOST_DRIFT = 1.1
"""A row is refused if the baseline's rounds before and after it differ by more than this ratio, or if its own time
would at the CPU's speed beside the baseline."""


@click.command("every_technique")
@click.argument("name", metavar="MODEL", type=click.Choice(FAMILIES))
@measures(record="results/techniques-MODEL.json", repeats=3, warmup=3, rounds=ROUNDS)
@click.option("--only", multiple=True, metavar="RECIPE", help="This recipe, over --steps; repeat for more.")
@click.option("--steps", type=click.IntRange(1, 1000), help=f"For --only. Default: {STEPS}.")
@click.option(
    "--part",
    type=click.Choice(["alone", "compiled", "configurations", "all"]),
    default="all",
    show_default=True,
)
@click.option("--best", type=click.IntRange(1, 50), help="The fastest so far again, at full length.")
@click.option("--compile", "at_once", type=click.IntRange(1, 64), help="Only compile, this many at a time.")
@click.option("--alone", "without_baseline", is_flag=True, help="Measure without a baseline beside it.")
@click.option(
    "--together",
    type=click.IntRange(1, 10),
    default=3,
    show_default=True,
    help="Recipes between two rounds of a baseline.",
)
def every_technique(
    name: str,
    how: Measuring,
    only: Sequence[str],
    steps: int | None,
    part: str,
    best: int | None,
    at_once: int | None,
    without_baseline: bool,
    together: int,
) -> int:
    """Every technique on one model with random weights, one line per recipe; resumable."""
    record = how.record or record_file(name)
    if steps is not None and not only:
        raise click.UsageError("--steps is for recipes that are named; add --only RECIPE")
    planned = cases(name, part, only, steps or STEPS)
    records = read_records(record)
    done = {key_of(record) for record in finished(name, records)}
    if at_once is not None:
        return _compile(name, [case for case in planned if case not in done], record, at_once, how)
    if best is not None:
        planned = [(recipe, full_length(name)) for recipe in fastest(name, records, best)]
    with studies.start_launcher(how.device) as launcher:
        missing = [case for case in planned if case not in done]
        for group in groups(missing, 1 if without_baseline else together):
            if how.is_over:
                return how.ended(group[0][0])
            _measure_group(name, group, how, launcher, record, without_baseline)
    return 0


def groups(cases: Sequence[Key], most: int) -> list[list[Key]]:
    """Return the cases in groups of up to `most`, in order, each of one number of steps."""
    grouped: list[list[Key]] = []
    for case in cases:
        if grouped and len(grouped[-1]) < most and grouped[-1][0][1] == case[1]:
            grouped[-1].append(case)
        else:
            grouped.append([case])
    return grouped


def _measure_group(
    name: str, group: Sequence[Key], how: Measuring, launcher: Launcher, record: Path, is_alone: bool
) -> None:
    """Measure cases beside one baseline, once more those during which the host's speed changed, and add them."""
    if is_alone:
        ((recipe, length),) = group
        new = measure(name, recipe, length, how, launcher)
        _tell(length, rows_of([new])[-1], None)
        add(new, record, baseline(name))
        return
    left = list(group)
    for _ in range(2):
        length = left[0][1]
        beside, *news = measure_beside(name, [recipe for recipe, _ in left], length, how, launcher)
        moved = {key_of(new): _moved_while_measured(beside, new) for new in news}
        for new in news:
            _tell(length, rows_of([beside, new])[-1], moved[key_of(new)])
        add_group(beside, news, record)
        left = [case for case in left if moved.get(case)]
        if not left:
            return


def _moved_while_measured(beside: Record, new: Record) -> str | None:
    return has_moved(beside, new) if new.outcome is beside.outcome is Outcome.MEASURED else None


def _tell(length: int, row: Row, moved: str | None) -> None:
    note = f" (the host's speed changed: {moved})" if moved else ""
    click.echo(f"{length} steps, {line(row)}{note}")


def is_done(name: str, record: Record, beside: Record | None) -> bool:
    """Whether a row is complete: timed often enough for an interval on a steady host, or failed for good.

    Args:
        beside: the baseline that was measured beside it.
    """
    if record.outcome is not Outcome.MEASURED:
        return record.outcome.is_final
    if beside is None or (num_timed(record) < MIN_SAMPLES and key_of(record)[1] == full_length(name)):
        return False
    if len(beside.rounds) < ROUNDS:  # an old row of one process
        return name not in COMMON
    return has_moved(beside, record) is None


def has_moved(beside: Record, record: Record) -> str | None:
    """Return how the host's speed changed while a row was measured; None if by no more than MOST_DRIFT."""
    medians = [
        float(np.median([s.total_s for s in round_.samples])) for round_ in beside.rounds if round_.samples
    ]
    if len(medians) > 1 and max(medians) > MOST_DRIFT * min(medians):
        return f"the baseline took {min(medians):.3g} and {max(medians):.3g} s"
    _, row = rows_of([beside, record])
    if row.cpu_stretch is None or abs(math.log(row.cpu_stretch)) > math.log(MOST_DRIFT):
        return f"Python took {row.cpu_ratio:.2f} times as long as beside the baseline"
    return None


def finished(name: str, records: Sequence[Record]) -> list[Record]:
    """Return the complete rows (see `is_done`)."""
    return [
        record for record, beside in with_baselines(records, baseline(name)) if is_done(name, record, beside)
    ]


def fastest(name: str, records: Sequence[Record], number: int) -> list[str]:
    """Return the `number` recipes with the greatest speed-up over eight steps."""
    rows = [
        row
        for row in rows_with_baselines(records, baseline(name))
        if row.speedup is not None and key_of(row.record)[1] == STEPS
    ]
    rows.sort(key=lambda row: -row.speedup.point if row.speedup else 0)
    return list(dict.fromkeys(row.recipe for row in rows))[:number]


def measure(name: str, recipe: str, steps: int, how: Measuring, launcher: Launcher) -> Record:
    """Measure one recipe on the model with random weights, in one process."""
    (record,) = _bench(name, [recipe], steps, how, launcher, how.timing.model_copy(update={"rounds": 1}))
    return record


def measure_beside(
    name: str, recipes: Sequence[str], steps: int, how: Measuring, launcher: Launcher
) -> list[Record]:
    """Measure recipes between rounds of their baseline; return the baseline and the recipes."""
    return _bench(name, [baseline(name), *recipes], steps, how, launcher, how.timing)


def _bench(
    name: str, recipes: Sequence[str], steps: int, how: Measuring, launcher: Launcher, timing: Timing
) -> list[Record]:
    run = vivace.bench(
        SYNTHETIC + name,
        recipes,
        num_inference_steps=steps,
        timing=timing,
        device=how.device,
        store=how.store,
        rerun=True,
        quality=False,
        rivals=False,
        progress=for_this_terminal(),
        launcher=launcher,
    )
    return run.records


def _compile(name: str, cases: Sequence[Key], record: Path, at_once: int, how: Measuring) -> int:
    """Run each recipe that compiles in a separate process, one call over eight steps: compiled graphs do not depend on
    the number of steps."""
    path = first_calls_file(record)
    stored = read_records(path)
    done = {record.trial.recipe.text for record in stored if record.outcome.is_final}
    left = [
        text for text in dict.fromkeys(text for text, _ in cases) if "compile" in text and text not in done
    ]
    if not left:
        click.echo("all compiled already")
    status = 0
    running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < at_once and not how.is_over:
                recipe = left.pop(0)
                part = Path(folder) / f"{len(left)}.json"
                arguments = ["--only", recipe, "--alone", "--repeats", "1", "--warmup", "1"]
                arguments += ["--record", str(part), "--store", str(part.with_suffix(""))]
                arguments += ["--device", how.device, "--timeout", f"{how.timing.timeout_s:g}"]
                running.append((recipe, part, _start(name, arguments)))
            if not running:
                return how.ended(", ".join(left))
            time.sleep(0.2)
            for job in [job for job in running if job[2].poll() is not None]:
                running.remove(job)
                recipe, part, process = job
                records = read_records(part)
                if not records:
                    click.echo(f"{recipe}: the process ended with {process.returncode} and no record")
                    status = MEASURED_IN_PART
                    continue
                stored = add(records[0], path, baseline(name))
                click.echo(f"compiling, {line(rows_of(records)[0])}")
    return status


def _start(name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.every_technique", name, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(run(every_technique))
