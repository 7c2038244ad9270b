"""Run a study file, and compare the results with the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from vivace.answers.data import dataframe
from vivace.benchmark import studies as benches
from vivace.benchmark.places.local_pool import NumGpus
from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.run_settings import DEFAULT_SETTINGS, RunSettings
from vivace.benchmark.store.compared import Purpose
from vivace.evidence.studies.expand import ModelPart, expand
from vivace.evidence.studies.judging import JudgedClaim, SpeedUp, judge, speed_up, spread_of
from vivace.evidence.studies.study_columns import StudyCell, StudyColumn, cell_of, published_columns
from vivace.evidence.studies.study_file import Claim, StudyFile, read_study
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.recipe_syntax import unpinned
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.task_names import Device
from vivace.report.rows import Row

_NOT_MEASURED = StudyCell("not_measured", note="the record has no round of it yet")


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
        by_device = {
            device: {
                c.label: mine[unpinned(c.recipe)]
                for c in self.planned.cases
                if unpinned(c.recipe) in mine and not c.refused
            }
            for device, mine in by_recipe.items()
        }
        number = {device: sum(map(_is_measured, rows.values())) for device, rows in by_device.items()}
        # A baseline that was measured alone, beside rows of other parts, does not count for this one.
        devices = [device for device, rows in by_device.items() if len(rows) > 1] or list(by_device)
        return {device: by_device[device] for device in sorted(devices, key=lambda device: -number[device])}

    @property
    def key(self) -> tuple[str, str]:
        return self.planned.part.name, self.planned.model

    @property
    def rows(self) -> dict[str, Row]:
        return next(iter(self.on_devices.values()), {})

    def cells(
        self, rows: Mapping[str, Row], *, with_missing: bool
    ) -> Iterator[tuple[tuple[str, str, str, str], StudyCell]]:
        for case, figure in product(self.planned.cases, self.planned.part.figures):
            cell = StudyCell("refused", note=case.refused) if case.refused else _NOT_MEASURED
            if case.label in rows:
                cell = cell_of(rows[case.label], figure)
            if cell is not _NOT_MEASURED or with_missing:
                yield (*self.key, case.label, figure), cell

    def baselines(self, device: str) -> tuple[Row, ...]:
        rows = [compared.rows()[0] for compared in self.compared if compared.records]
        return tuple(row for row in rows if row.record.environment.device_name == device)

    @property
    def is_complete(self) -> bool:
        rows = self.on_devices.values()
        return all(
            any(case.label in mine and _is_measured(mine[case.label]) for mine in rows)
            for case in self.planned.cases
        )

    def gains(self) -> list[tuple[str, SpeedUp | None]]:
        rows, device = self.rows, next(iter(self.on_devices), "")
        spread, baselines = spread_of(rows.values()), self.baselines(device)
        gains = []
        for gain in self.planned.gains:
            before, after = rows.get(gain.without), rows.get(gain.with_)
            measured = speed_up(before, after, baselines, spread) if before and after else None
            gains.append((gain.member, measured))
        return gains


@dataclass(frozen=True)
class StudyRun:
    """The published and measured numbers of a study. `print(run)` shows its tables; iterating yields the records.

    Attributes:
        store: where the images are; None for a run from a record, which need not have every row.
        price_per_hour: of the machine, in any currency, for the cost of images.
    """

    file: StudyFile
    store: Path | None
    parts: tuple[MeasuredPart, ...]
    price_per_hour: float | None = None

    @property
    def records(self) -> list[Record]:
        return [r for part in self.parts for compared in part.compared for r in compared.records]

    @property
    def columns(self) -> list[StudyColumn]:
        """The published GPUs in their source's order, then the devices that measured."""
        return [*_published(self.file, [part.planned for part in self.parts]), *self.measured()]

    def measured(self) -> list[StudyColumn]:
        is_record = self.store is None
        columns: dict[str, StudyColumn] = {}
        for part in self.parts:
            for device, rows in part.on_devices.items():
                column = columns.setdefault(device, StudyColumn(device, "measured", {}))
                column.baselines[part.key] = part.baselines(device)
                column.rows.update({(*part.key, label): row for label, row in rows.items()})
                column.cells.update(part.cells(rows, with_missing=is_record))
        if is_record and columns:
            # Parts that no device has measured are in the first one's column.
            somewhere = {key[:2] for column in columns.values() for key in column.cells}
            for part in self.parts:
                if part.key not in somewhere:
                    next(iter(columns.values())).cells.update(part.cells({}, with_missing=True))
        return list(columns.values())

    def claims(self) -> list[tuple[Claim, list[JudgedClaim]]]:
        """Return each conclusion with every column's verdict.

        Published numbers are judged by all models of the study, also by those that this run left out.
        """
        everything = expand(self.file)
        published = _published(self.file, everything)
        planned, measured = [part.planned for part in self.parts], self.measured()
        return [
            (claim, [*judge(claim, everything, published), *judge(claim, planned, measured)])
            for claim in self.file.claim
        ]

    @property
    def is_complete(self) -> bool:
        return all(part.is_complete for part in self.parts)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one flat dictionary for each cell: published and measured, in seconds, bytes or the figure's unit."""
        from vivace.evidence.studies.study_answer import flat

        return flat(self)

    def to_dataframe(self) -> Any:
        """Return `to_dicts` as a pandas DataFrame.

        Raises:
            Unsupported: pandas is not installed.
        """
        return dataframe(self.to_dicts())

    def page(self) -> str:
        """Return the page as HTML: published beside measured, conclusions, charts and images; no scripts, no links."""
        from vivace.answers.page import page_of
        from vivace.evidence.studies.study_answer import answer_of

        return page_of(answer_of(self))

    def _repr_html_(self) -> str:
        from vivace.answers.page import in_notebook

        return in_notebook(self.page())

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        from vivace.answers.markdown import markdown_of
        from vivace.evidence.studies.study_answer import answer_of

        return markdown_of(answer_of(self))


def _published(file: StudyFile, planned: Sequence[ModelPart]) -> list[StudyColumn]:
    tables = {model_part.part.name: model_part.part.tables for model_part in planned}
    return published_columns(file.cells, tables, [model_part.model for model_part in planned])


def study(
    name: str | Path | StudyFile,
    *,
    tiny: bool = False,
    synthetic: bool = False,
    models: Sequence[str] = (),
    parts: Sequence[str] = (),
    device: Device = "auto",
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    launcher: Launcher | None = None,
    gpus: NumGpus | None = None,
    ray: str | None = None,
) -> StudyRun:
    """Run a published study or a study file, and return its results beside the published ones.

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
    settings = RunSettings(
        store=store,
        rerun=rerun,
        progress=progress or SILENT,
        command=command,
        launcher=launcher,
        gpus=gpus,
        ray=ray,
    )
    return run_parts(file, planned, settings)


def run_parts(
    file: StudyFile, planned: Sequence[ModelPart], settings: RunSettings = DEFAULT_SETTINGS
) -> StudyRun:
    """Run the parts of a study one after the other, with one launcher and one pool of places; see `study`."""
    check(planned)
    for model_part in planned:
        settings.check(model_part.study)
    settings = replace(settings, purpose=Purpose.STUDY)
    parts = []
    with ExitStack() as stack:
        if planned:
            device, launcher = planned[0].study.device, settings.launcher
            if launcher is None:
                launcher = stack.enter_context(benches.start_launcher(device))
            settings = replace(settings, launcher=launcher)
            if settings.pool is None and settings.is_spread:
                pool = stack.enter_context(closing(benches.start_pool(settings, device, launcher)))
                settings = replace(settings, pool=pool)
        for model_part in planned:
            run: Run = benches.run_study(model_part.study, settings)
            parts.append(MeasuredPart(model_part, run.comparisons))
    return StudyRun(file, settings.folder, tuple(parts))


def check(planned: Sequence[ModelPart]) -> None:
    """Check every comparison before the first one starts: an error in the last one should not cost an hour."""
    from vivace.benchmark.comparison import comparisons

    for model_part in planned:
        comparisons(model_part.study)
