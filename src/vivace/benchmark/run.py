"""The result of a study: records and image quality, one comparison for each model and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.benchmark.rounds.planned import Planned
from vivace.benchmark.run_page import page_of
from vivace.benchmark.store.compared import Compared as Compared
from vivace.errors import StoreError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.study import Study
from vivace.report.charts import charts
from vivace.report.dataframe import dataframe
from vivace.report.page import in_notebook
from vivace.report.rows import Row
from vivace.report.summary import summary
from vivace.report.table import csv_row, render


@dataclass(frozen=True)
class Run:
    """A study's result. `print(run)` shows tables and verdicts; iterating yields the records of all comparisons.

    Attributes:
        answers: with `until`, a line for each recipe with its answer, or the lack of one.
        planned: the memory that `vivace plan` predicts for each trial, beside what was measured; empty on a CPU, and
            where nothing was measured anew.
    """

    study: Study
    store: Path
    comparisons: tuple[Compared, ...]
    answers: tuple[str, ...] = ()
    planned: tuple[Planned, ...] = ()

    @property
    def records(self) -> list[Record]:
        """The records of all comparisons, one for each recipe; each comparison starts with its baseline."""
        return [record for compared in self.comparisons for record in compared.records]

    def rows(self, limits: Limits = DEFAULT_LIMITS) -> list[Row]:
        """Return the rows of all comparisons (see `Compared.rows`)."""
        return [row for compared in self.comparisons for row in compared.rows(limits)]

    def to_dicts(self, limits: Limits = DEFAULT_LIMITS) -> list[dict[str, Any]]:
        """Return one flat dictionary for each row: the columns of `vivace bench --format csv`, in seconds and bytes."""
        return [csv_row(row) for row in self.rows(limits)]

    def to_dataframe(self, limits: Limits = DEFAULT_LIMITS) -> Any:
        """Return `to_dicts` as a pandas DataFrame.

        Raises:
            Unsupported: pandas is not installed.
        """
        return dataframe(self.to_dicts(limits))

    def page(self, limits: Limits = DEFAULT_LIMITS) -> str:
        """Return the page of the run's store as HTML: tables, charts and images in one file that needs no network."""
        return page_of([self.store], limits)

    def charts(self, limits: Limits = DEFAULT_LIMITS) -> dict[str, str]:
        """Return the charts of all comparisons as SVG, by the names of their files."""
        files = {}
        for number, compared in enumerate(self.comparisons, 1):
            for name, svg in charts(compared.rows(limits)).items():
                files[name if len(self.comparisons) == 1 else f"{number}-{name}"] = svg
        return files

    def _repr_html_(self) -> str:
        """Return the tables, charts and images for notebooks; the tables alone where the store is gone."""
        try:
            return in_notebook(self.page())
        except StoreError:
            return in_notebook(str(self))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def __str__(self) -> str:
        tables = [compared.rows() for compared in self.comparisons]
        return "\n".join(f"{render(rows, 'md')}\n{summary(rows)}" for rows in tables if rows)
