"""The result of a study: records and image quality, one comparison for each model and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.answers.answer import Answer
from vivace.answers.data import dataframe
from vivace.answers.markdown import markdown_of
from vivace.benchmark.rounds.planned import Planned
from vivace.benchmark.store.compared import Compared as Compared
from vivace.benchmark.stored_answer import answer_of_stores, joined, reader, svg_files
from vivace.errors import StoreError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.study import Study
from vivace.report.csv_rows import csv_row
from vivace.report.rows import Row, priced
from vivace.report.run_answer import answer_of


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
        """Return `to_dicts` as a pandas DataFrame."""
        return dataframe(self.to_dicts(limits))

    def answer(self, limits: Limits = DEFAULT_LIMITS, price_per_hour: float | None = None) -> Answer:
        """Return the run as an answer, a part for each comparison if there are several."""
        read = reader([self.store])
        parts = [
            answer_of(priced(compared.rows(limits), price_per_hour), read=read)
            for compared in self.comparisons
            if compared.records
        ]
        return joined(parts, "bench")

    def page(self, limits: Limits = DEFAULT_LIMITS) -> str:
        """Return the page of the run's store as HTML: tables, charts and images in one file that needs no network."""
        from vivace.answers.page import page_of

        return page_of(answer_of_stores([self.store], limits))

    def charts(self, limits: Limits = DEFAULT_LIMITS) -> dict[str, str]:
        """Return the charts of all comparisons as SVG, by the names of their files."""
        files = {}
        for number, compared in enumerate(self.comparisons, 1):
            for name, svg in svg_files(compared.rows(limits)).items():
                files[name if len(self.comparisons) == 1 else f"{number}-{name}"] = svg
        return files

    def _repr_html_(self) -> str:
        """Return the tables, charts and images for notebooks; the tables alone where the store is gone."""
        from vivace.answers.page import in_notebook

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
        return markdown_of(self.answer())
