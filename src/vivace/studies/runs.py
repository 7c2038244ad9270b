"""Run a study file, and put what was measured beside what was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vivace.benchmark import studies as benches
from vivace.benchmark.launcher import Launcher
from vivace.benchmark.places.local_pool import NumGpus
from vivace.benchmark.places.spread import Pool
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.runner import Progress
from vivace.benchmark.store import DEFAULT_STORE
from vivace.report.dataframe import dataframe
from vivace.report.rows import Row
from vivace.spec.recipe import unpinned
from vivace.spec.record import Outcome, Record
from vivace.studies.claims import Claim, Judged
from vivace.studies.expand import ModelPart, expand
from vivace.studies.figures import Cell, Column, cell_of, published_columns
from vivace.studies.file import StudyFile, read_study
from vivace.studies.gains import SpeedUp, speed_up, spread_of
from vivace.studies.judging import judge

_NOT_MEASURED = Cell("not_measured", note="the record has no round of it yet")


def _is_measured(row: Row) -> bool:
    return row.record.outcome is Outcome.MEASURED


@dataclass(frozen=True)
class MeasuredPart:
    """A part on one model with its rows.

    Attributes:
        compared: one for each GPU or host that measured some of it; empty before it was run.
        on_devices: rows by the label of a case, by the name of a device, the one with the most measured rows first.
            Cases whose techniques conflict have none. Rows of two kinds of GPU never stand in one comparison.
    """

    planned: ModelPart
    compared: tuple[Compared, ...] = ()

    @cached_property
    def on_devices(self) -> dict[str, dict[str, Row]]:
        by_recipe: dict[str, dict[str, Row]] = {}
        for compared in self.compared:
            for row in compared.rows():
                mine = by_recipe.setdefault(row.record.environment.device_name, {})
                mine.setdefault(unpinned(row.record.trial.recipe.text), row)
        found = {
            device: {
                c.label: mine[unpinned(c.recipe)]
                for c in self.planned.cases
                if unpinned(c.recipe) in mine and not c.refused
            }
            for device, mine in by_recipe.items()
        }
        number = {device: sum(map(_is_measured, rows.values())) for device, rows in found.items()}
        # A baseline that was measured alone, beside other parts' rows, says nothing of this one.
        told = [device for device, rows in found.items() if len(rows) > 1] or list(found)
        return {device: found[device] for device in sorted(told, key=lambda device: -number[device])}

    @property
    def device(self) -> str | None:
        """The device with the most measured rows; None before any was measured."""
        return next(iter(self.on_devices), None)

    @property
    def rows(self) -> dict[str, Row]:
        """The rows of that device."""
        return next(iter(self.on_devices.values()), {})

    def baselines(self, device: str) -> tuple[Row, ...]:
        """Return the baselines of a device's comparisons."""
        found = [compared.rows()[0] for compared in self.compared if compared.records]
        return tuple(row for row in found if row.record.environment.device_name == device)

    @property
    def is_complete(self) -> bool:
        """Whether each case was measured on some device."""
        rows = self.on_devices.values()
        return all(
            any(case.label in mine and _is_measured(mine[case.label]) for mine in rows)
            for case in self.planned.cases
        )

    def gains(self) -> list[tuple[str, SpeedUp | None]]:
        """Return what each member of a stack, or of a recipe that was taken apart, contributes."""
        rows = self.rows
        spread = spread_of(rows.values())
        baselines = () if self.device is None else self.baselines(self.device)
        found = []
        for gain in self.planned.gains:
            before, after = rows.get(gain.without), rows.get(gain.with_)
            measured = speed_up(before, after, baselines, spread) if before and after else None
            found.append((gain.member, measured))
        return found


@dataclass(frozen=True)
class StudyRun:
    """What a study published and measured. `print(run)` shows its tables; iterating yields the records.

    Attributes:
        store: where the images are; None for a run from a record, which need not have every row.
        price_per_hour: of the machine, in any currency, to say what images cost.
    """

    file: StudyFile
    store: Path | None
    parts: tuple[MeasuredPart, ...]
    price_per_hour: float | None = None

    @property
    def records(self) -> list[Record]:
        return [r for part in self.parts for compared in part.compared for r in compared.records]

    @property
    def columns(self) -> list[Column]:
        """The published GPUs in their source's order, then the devices that measured."""
        return [*self.published(), *self.measured()]

    def published(self) -> list[Column]:
        return _published(self.file, [one.planned for one in self.parts])

    def measured(self) -> list[Column]:
        cells: dict[str, dict[tuple[str, str, str, str], Cell]] = {}
        rows: dict[str, dict[tuple[str, str, str], Row]] = {}
        baselines: dict[str, dict[tuple[str, str], tuple[Row, ...]]] = {}
        for one in self.parts:
            part, model = one.planned.part.name, one.planned.model
            for device, found in one.on_devices.items():
                here = cells.setdefault(device, {})
                baselines.setdefault(device, {})[(part, model)] = one.baselines(device)
                for case in one.planned.cases:
                    row = found.get(case.label)
                    if row is not None:
                        rows.setdefault(device, {})[(part, model, case.label)] = row
                    for figure in one.planned.part.figures:
                        key = (part, model, case.label, figure)
                        if row is not None:
                            here[key] = cell_of(row, figure)
                        elif case.refused:
                            here[key] = Cell("refused", note=case.refused)
                        elif self.store is None:
                            here[key] = _NOT_MEASURED
        if self.store is None and cells:
            # What no device has measured stands in the first one's column.
            somewhere = {key[:2] for here in cells.values() for key in here}
            first = next(iter(cells.values()))
            first |= {key: cell for key, cell in self._missing() if key[:2] not in somewhere}
        return [
            Column(device, "measured", found, rows.get(device, {}), baselines.get(device, {}))
            for device, found in cells.items()
        ]

    def _missing(self) -> Iterator[tuple[tuple[str, str, str, str], Cell]]:
        """Yield what every cell is as long as its row is not measured, by part, model, row and figure."""
        for one in self.parts:
            for case in one.planned.cases:
                cell = Cell("refused", note=case.refused) if case.refused else _NOT_MEASURED
                for figure in one.planned.part.figures:
                    yield (one.planned.part.name, one.planned.model, case.label, figure), cell

    def claims(self) -> list[tuple[Claim, list[Judged]]]:
        """Return each conclusion with what every column says of it.

        Published numbers are judged by all models of the study, also by those that this run left out.
        """
        everything = expand(self.file)
        published = _published(self.file, everything)
        planned, measured = [one.planned for one in self.parts], self.measured()
        return [
            (claim, [*judge(claim, everything, published), *judge(claim, planned, measured)])
            for claim in self.file.claim
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every recipe was measured."""
        return all(one.is_complete for one in self.parts)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one flat dictionary for each cell: published and measured, in seconds, bytes or the figure's unit."""
        from vivace.studies.table import flat

        return flat(self)

    def to_dataframe(self) -> Any:
        """Return `to_dicts` as a pandas DataFrame.

        Raises:
            Unsupported: pandas is not installed.
        """
        return dataframe(self.to_dicts())

    def page(self) -> str:
        """Return the page as HTML: published beside measured, conclusions, charts and images; no scripts, no links."""
        from vivace.studies.page import page_of

        return page_of(self)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        from vivace.studies.table import render

        return render(self, "md")


def _published(file: StudyFile, planned: Sequence[ModelPart]) -> list[Column]:
    """Return the published columns of these parts on these models."""
    tables = {one.part.name: one.part.tables for one in planned}
    return published_columns(file.cells, tables, [one.model for one in planned])


def study(
    name: str | Path | StudyFile,
    *,
    tiny: bool = False,
    synthetic: bool = False,
    models: Sequence[str] = (),
    parts: Sequence[str] = (),
    device: str = "auto",
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
    gpus: NumGpus | None = None,
    ray: str | None = None,
) -> StudyRun:
    """Run a published study or a study file, and return what was measured beside what was published.

    Rounds that the store already holds are not measured again, so the same call resumes an interrupted study.

    Args:
        name: "000" to "004", the path of a .toml file, or a StudyFile.
        tiny: embedded models in the place of the study's, in minutes on a CPU.
        synthetic: the study's models with random weights: time and memory at full size without a download.
        models, parts: only these; empty for all.
        command: the command line to store with the run; None for the equivalent `vivace bench`.
        store, rerun, progress, launcher, gpus, ray: see `vivace.bench`.

    Raises:
        UsageError, UnknownModel, StoreError, Unsupported: before anything is measured.
    """
    file = name if isinstance(name, StudyFile) else read_study(name)
    planned = expand(file, tiny=tiny, synthetic=synthetic, models=models, parts=parts, device=device)
    return run_parts(
        file,
        planned,
        device=device,
        store=store,
        rerun=rerun,
        progress=progress,
        command=command,
        launcher=launcher,
        gpus=gpus,
        ray=ray,
    )


def run_parts(
    file: StudyFile,
    planned: Sequence[ModelPart],
    *,
    device: str = "auto",
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
    gpus: NumGpus | None = None,
    ray: str | None = None,
    pool: Pool | None = None,
) -> StudyRun:
    """Run the parts of a study one after the other, with one launcher and one pool of places; see `study`.

    Args:
        pool: places to spread the trials over, instead of those that `gpus` or `ray` name.
    """
    check(planned)
    for one in planned:
        benches.check_spread(one.study, gpus, ray)
    found = []
    with ExitStack() as stack:
        if launcher is None:
            launcher = stack.enter_context(benches.start_launcher(device))
        if pool is None and planned and (gpus is not None or ray is not None):
            pool = stack.enter_context(closing(benches.start_pool(planned[0].study, launcher, gpus, ray)))
        for one in planned:
            run: Run = benches.run_study(
                one.study,
                store=store,
                rerun=rerun,
                progress=progress,
                command=command,
                launcher=launcher,
                pool=pool,
            )
            found.append(MeasuredPart(one, run.comparisons))
    return StudyRun(file, Path(store), tuple(found))


def check(planned: Sequence[ModelPart]) -> None:
    """Check every comparison before the first one starts: an error in the last one should not cost an hour.

    Raises:
        UsageError, UnknownModel, UnusableModel, Unsupported, WorkloadError: see `vivace.benchmark.comparison`.
    """
    from vivace.benchmark.comparison import comparisons

    for one in planned:
        comparisons(one.study)
