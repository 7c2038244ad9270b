"""Measure the published studies at full size with random weights, in as many runs as it takes.

    python -m benchmarks.studies 002 --limit-s 400         measure what results/study-002.json lacks, until the limit
    python -m benchmarks.studies --list                    what is missing of all five, with estimates
    python -m benchmarks.studies 002 --compile 4           first fill the compiler's cache, four recipes at a time
    python -m benchmarks.studies 001 --from-store .vivace  add what `vivace study 001 --synthetic` measured into a store

The record is written after each trial, and the same command goes on with what is missing, the cheapest first, on any
machine of the same kind: a sitting of a model begins with its baselines, so that each row has one beside it. Records of
the other scripts have some of the same trials, which are not measured again. docs/studies/ is generated from all of
them (`make docs`).
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.command import MEASURED_IN_PART, locked, run
from benchmarks.every_model import line
from benchmarks.sittings import of_store, with_row, write_sittings
from benchmarks.study_groups import (
    RESULTS,
    Group,
    all_sittings,
    groups_of,
    own,
    plain,
    record_file,
    record_of,
)
from vivace.answers.formatting import seconds
from vivace.benchmark import RunSettings, Timing, studies
from vivace.benchmark.rounds.schedule import SITTING_S
from vivace.benchmark.store import Store
from vivace.cli.display.progress_display import for_this_terminal
from vivace.errors import UsageError, nearest
from vivace.evidence.studies.sittings import Sitting, SittingRow
from vivace.evidence.studies.study_file import published_studies
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome, Record
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of
from vivace.techniques.compile import Compile

CACHED_S = 25.0
"""A trial whose code is in the compiler's cache takes at least so long: a cached first call took 9 to 25 s."""
SAME_CODE = ("scheduler", "steps", "guidance", "tiny_vae", "inference_mode")
"""Techniques that leave most of the compiled code as it is. `cfg_cutoff` does not: half the batch is another graph."""


@click.command("studies")
@click.argument("names", nargs=-1, metavar="[STUDY]...")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Of the records."
)
@click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start nothing that would end later than this.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Only this model; repeat for more.")
@click.option("--part", "parts", multiple=True, metavar="NAME", help="Only this part; repeat for more.")
@click.option("--only", multiple=True, metavar="RECIPE", help="Only this recipe, beside its baselines.")
@click.option("--rounds", type=click.IntRange(1, 20), default=1, show_default=True, help="Of each recipe.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="Timed calls.")
@click.option("--warmup", type=click.IntRange(1, 100), default=2, show_default=True, help="Warm-up calls.")
@click.option("--timeout", type=click.FloatRange(min=1), default=400.0, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tiny", is_flag=True, help="Embedded models, for a trial of this script; give --folder.")
@click.option("--list", "only_list", is_flag=True, help="Print what is missing; measure nothing.")
@click.option(
    "--compile", "at_once", type=click.IntRange(1, 64), help="Compile so many recipes at a time first."
)
@click.option(
    "--from-store", "source", type=click.Path(path_type=Path, file_okay=False), help="Add its rows."
)
def command(
    names: Sequence[str],
    folder: Path,
    store: Path,
    limit_s: float | None,
    models: Sequence[str],
    parts: Sequence[str],
    only: Sequence[str],
    rounds: int,
    repeats: int,
    warmup: int,
    timeout: float,
    device: str,
    tiny: bool,
    only_list: bool,
    at_once: int | None,
    source: Path | None,
) -> int:
    """Measure the published studies, one line per trial; resumable."""
    for name in names:
        if name not in published_studies():
            raise UsageError(f"no study '{name}'{nearest(name, published_studies())}")
    if tiny and folder == RESULTS:
        raise UsageError("--tiny: results/ holds full-size models; give --folder another folder")
    timing = Timing(rounds=1, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
    groups = [
        group
        for name in names or published_studies()
        for group in groups_of(name, timing, tiny=tiny, parts=parts, device=device)
    ]
    if models:
        groups = _of_models(groups, models)
    if source is not None:
        return _add_store(groups, source, folder)
    run_ = Running(folder, store, device, timing, limit_s, tuple(resolve(text).text for text in only))
    if only_list:
        return run_.list(groups, rounds)
    with studies.start_launcher(device) as launcher:
        for number in range(1, rounds + 1):
            for group in sorted(groups, key=lambda group: run_.mean_s(group, number)):
                if at_once is not None:
                    run_.compile(group, number, at_once)
                if not run_.measure(group, number, launcher):
                    click.echo(
                        f"{limit_s:g} s are over; the same command goes on with {group.name}", err=True
                    )
                    return MEASURED_IN_PART
    return 0


@dataclass(frozen=True)
class Running:
    """One call of this script.

    Attributes:
        only: recipes in canonical form; empty for all.
        started: time.monotonic() at the start.
        compiled: what the compiler's cache has by now, by model and the techniques that the code depends on.
    """

    folder: Path
    store: Path
    device: str
    timing: Timing
    limit_s: float | None
    only: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)
    compiled: set[tuple[str, ...]] = field(default_factory=set)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.limit_s is None else self.limit_s - (time.monotonic() - self.started)

    def cost_s(self, group: Group, recipe: str) -> float:
        """Return the estimate of a trial; less if the compiler's cache has its code."""
        cost_s = group.known_s[recipe]
        if _code_of(group, recipe) in self.compiled:
            cost_s = min(cost_s, CACHED_S)
        return cost_s

    def missing(self, group: Group, rounds: int) -> list[str]:
        recipes = group.missing(all_sittings(group.file.name, self.folder), rounds)
        return [recipe for recipe in recipes if not self.only or recipe in self.only]

    def next_of(self, group: Group, todo: Sequence[str]) -> str:
        """Return what to measure next: baselines, then the cheapest, of equally cheap ones the study's first.

        Costs fall as the compiler's cache fills. Those that failed before, at the end of `todo`, stay there.
        """
        baselines = group.baselines(todo)
        if todo[0] in baselines:
            return todo[0]
        failed = group.failed(all_sittings(group.file.name, self.folder))
        order = list(group.known_s)

        def place(recipe: str) -> tuple[bool, int, int]:
            power_of_two = math.frexp(self.cost_s(group, recipe))[1]
            return recipe in failed, power_of_two, order.index(recipe)

        return min(todo, key=place)

    def mean_s(self, group: Group, rounds: int) -> float:
        """Return the mean estimate of a trial that is missing, by which groups are ordered."""
        missing_recipes = self.missing(group, rounds)
        return (
            statistics.mean(group.known_s[recipe] for recipe in missing_recipes) if missing_recipes else 0.0
        )

    def list(self, groups: Sequence[Group], rounds: int) -> int:
        """Print what is missing, the cheapest group first."""
        total = 0.0
        for group in sorted(groups, key=lambda group: self.mean_s(group, rounds)):
            missing = self.missing(group, rounds)
            trials = {case.recipe for part in group.parts for case in part.cases if case.refused is None}
            costs_s = {}
            todo = list(dict.fromkeys([*group.baselines(missing), *missing]))
            while todo:
                recipe = self.next_of(group, todo)
                todo.remove(recipe)
                costs_s[recipe] = self.cost_s(group, recipe)
                if _compiles(recipe):
                    self.compiled.add(_code_of(group, recipe))
            cost_s = sum(costs_s.values())
            total += cost_s
            click.echo(
                f"{group.name}: {len(missing)} of {len(trials)} trials missing, about {seconds(cost_s)}"
            )
            for recipe, trial_s in costs_s.items():
                click.echo(f"    {recipe}: about {seconds(trial_s)}")
        click.echo(f"in all about {seconds(total)}")
        return 0

    def measure(self, group: Group, rounds: int, launcher: Launcher) -> bool:
        """Measure what a group lacks, as one sitting; return whether nothing is left for lack of time."""
        missing = self.missing(group, rounds)
        if not missing:
            return True
        sitting = self._continued(group)
        todo = list(dict.fromkeys([*group.baselines(missing), *missing]))
        while todo:
            recipe = self.next_of(group, todo)
            todo.remove(recipe)
            if sitting is not None and sitting.row(recipe) is not None:
                continue
            if self.cost_s(group, recipe) > self.left_s():
                return False
            before = time.monotonic()
            record = _measured(group, recipe, self.timing, self.store, self.device, launcher)
            if record.outcome is Outcome.MEASURED and _compiles(recipe):
                self.compiled.add(_code_of(group, recipe))
            sitting = self._add(group, sitting, record)
            first = sitting.row(group.baselines([recipe])[0])
            beside = record if first is None else record_of(sitting, first)
            row = rows_of([beside, record])[1] if recipe != beside.trial.recipe.text else rows_of([record])[0]
            click.echo(f"{group.file.name} {line(row)} ({time.monotonic() - before:.0f} s)")
        return True

    def compile(self, group: Group, rounds: int, at_once: int) -> None:
        """Fill the compiler's cache; recipes that time kernels to choose them are left to their own round."""
        workload = group.parts[0].study.workload
        missing_recipes = self.missing(group, rounds) if self.left_s() > 0 else []
        left: list[str] = []
        begun = set(self.compiled)
        for recipe in missing_recipes:
            if _compiles(recipe) and not _tunes(recipe) and _code_of(group, recipe) not in begun:
                begun.add(_code_of(group, recipe))
                left.append(recipe)
        command = [
            sys.executable,
            "-m",
            "vivace",
            "warm",
            group.parts[0].measured_on,
            "--device",
            self.device,
        ]
        for flag, value in (("--height", workload.height), ("--width", workload.width)):
            command += [] if value is None else [flag, str(value)]
        running: list[tuple[str, float, subprocess.Popen[bytes]]] = []
        while left or running:
            while left and len(running) < at_once:
                recipe = left.pop(0)
                process = subprocess.Popen(
                    [*command, "--recipe", recipe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                running.append((recipe, time.monotonic(), process))
            time.sleep(0.2)
            for job in [job for job in running if job[2].poll() is not None or self.left_s() <= 0]:
                running.remove(job)
                if job[2].poll() is None:
                    left.clear()
                    job[2].kill()
                    job[2].wait()
                if job[2].returncode == 0:
                    self.compiled.add(_code_of(group, job[0]))
                spent = time.monotonic() - job[1]
                click.echo(f"{group.name} {job[0]}: compiled, exit {job[2].returncode} ({spent:.0f} s)")

    def _continued(self, group: Group) -> Sitting | None:
        """Return the last sitting of this model if it ended just now and on this machine: the store has its rounds."""
        mine = [s for s in own(group.file.name, self.folder) if s.model.name == group.parts[0].measured_on]
        if not mine or not self.store.exists():
            return None
        last = mine[-1].rows[-1]
        at = datetime.fromisoformat(last.round.started_at)
        if (datetime.now(UTC) - at).total_seconds() > SITTING_S:
            return None
        with Store.read_only(self.store) as store:
            stored = store.record(record_of(mine[-1], last).trial.key(mine[-1].environment))
        rounds = () if stored is None else stored.rounds
        return mine[-1] if any(round_.started_at == last.round.started_at for round_ in rounds) else None

    def _add(self, group: Group, sitting: Sitting | None, record: Record) -> Sitting:
        """Add a round to the record, to a sitting of it or to a new one; return the sitting."""
        path = record_file(group.file.name, self.folder)
        row = SittingRow(recipe=record.trial.recipe, round=plain(record.rounds[-1]))
        with locked(path):
            stored = own(group.file.name, self.folder)
            trial = record.trial
            current = sitting or Sitting(
                environment=record.environment,
                model=trial.model,
                workload=trial.workload,
                device=trial.device,
                rows=(),
            )
            grown = with_row(current, row)
            if sitting in stored:
                stored[stored.index(sitting)] = grown
            else:
                stored.append(grown)
            write_sittings(path, stored)
        return grown


def _of_models(groups: Sequence[Group], models: Sequence[str]) -> list[Group]:
    """Return the groups of models, each named as in the study or as in this script's lines.

    Raises:
        UsageError: no group is of one of the models.
    """
    names = [{group.parts[0].model, group.parts[0].measured_on} for group in groups]
    choices = sorted({group.parts[0].model for group in groups})
    for model in models:
        if not any(model in measured_on for measured_on in names):
            raise UsageError(
                f"--model {model}: no such model{nearest(model, choices)} ({', '.join(choices)})"
            )
    return [group for group, measured_on in zip(groups, names, strict=True) if measured_on & set(models)]


def _measured(
    group: Group, recipe: str, timing: Timing, store: Path, device: str, launcher: Launcher
) -> Record:
    """Measure one round of a recipe."""
    study = group.parts[0].study.model_copy(update={"recipes": (recipe,), "timing": timing, "device": device})
    study_run = studies.run_study(
        study, RunSettings(store=store, rerun=True, progress=for_this_terminal(), launcher=launcher)
    )
    return study_run.records[0]


def _compiles(recipe: str) -> bool:
    return any(isinstance(technique, Compile) for technique in resolve(recipe))


def _tunes(recipe: str) -> bool:
    """Whether kernels are timed to choose them, which other processes on the GPU would disturb."""
    return any(
        isinstance(technique, Compile) and "autotune" in technique.mode for technique in resolve(recipe)
    )


def _code_of(group: Group, recipe: str) -> tuple[str, ...]:
    """Return what most of a recipe's compiled code depends on: the model and the denoiser's techniques."""
    return (group.parts[0].measured_on, *(t.text for t in resolve(recipe) if t.name not in SAME_CODE))


def _add_store(groups: Sequence[Group], source: Path, folder: Path) -> int:
    """Add the sittings of a store that the records lack."""
    with Store.read_only(source) as store:
        for name in dict.fromkeys(group.file.name for group in groups):
            parts = [part for group in groups if group.file.name == name for part in group.parts]
            path = record_file(name, folder)
            with locked(path):
                stored = own(name, folder)
                times = {row.round.started_at for sitting in stored for row in sitting.rows}
                new = [s for s in of_store(store, parts) if not times & {r.round.started_at for r in s.rows}]
                if new:
                    write_sittings(path, [*stored, *new])
            click.echo(f"{name}: {sum(len(sitting.rows) for sitting in new)} rounds of {source}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(command))
