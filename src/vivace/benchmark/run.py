"""The result of a study: records and image quality, one comparison for each model and batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.answers.answer import Answer
from vivace.answers.data import dataframe
from vivace.answers.markdown import markdown_of
from vivace.benchmark.rounds.work import Planned
from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Compared as Compared
from vivace.benchmark.store.images import image_path
from vivace.errors import StoreError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.study import Study
from vivace.foundation.untrusted.streams import plain
from vivace.report.csv_rows import csv_row
from vivace.report.rows import Row, priced
from vivace.report.run_answer import answer_of, title_of
from vivace.report.run_charts import plots, times
from vivace.report.run_images import ReadImage

if TYPE_CHECKING:
    from PIL.Image import Image


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


def answer_of_stores(
    folders: Sequence[Path],
    limits: Limits = DEFAULT_LIMITS,
    price_per_hour: float | None = None,
    title: str | None = None,
    command: str = "report",
) -> Answer:
    """Return the answer of all runs in the stores, the newest command of each store first, with a headline of its own
    if there is a title."""
    read = reader(folders)
    parts = [
        answer_of(rows, command=command, read=read, reproduce=run.command, started_at=run.started_at)
        for compared, rows in _runs(folders, limits, price_per_hour)
        if (run := compared.run) is not None
    ]
    return joined(parts, command, title)


def joined(parts: Sequence[Answer], command: str, title: str | None = None) -> Answer:
    """Return the answers of runs as one; a single one without a title as it is."""
    if len(parts) == 1 and title is None:
        return parts[0]
    return Answer(
        command=command,
        headline=title or f"{len(parts)} comparisons",
        data=[row for part in parts for row in part.data],
        table=[row for part in parts for row in part.table],
        parts=tuple(replace(part, explains=False) for part in parts),
        explains=True,
    )


def reader(folders: Sequence[Path]) -> ReadImage:
    """Return a function that reads the images of stores, and what they were made from."""

    def read(sha256: str) -> Image | str:
        from vivace.answers.images import decode

        for folder in folders:
            for kind in ("pictures", "sources"):
                with suppress(OSError):
                    return decode(image_path(folder / kind, sha256).read_bytes())
        return decode(None)

    return read


def charts_of_stores(
    folders: Sequence[Path], limits: Limits = DEFAULT_LIMITS, price_per_hour: float | None = None
) -> dict[str, str]:
    """Return the charts of all runs in the stores as SVG, by the names of their files; see `answer_of_stores`."""
    files: dict[str, str] = {}
    for number, (_, rows) in enumerate(_runs(folders, limits, price_per_hour), 1):
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", rows[0].model).strip("-.")[-60:]
        files |= {f"{number}-{model}-{name}": svg for name, svg in svg_files(rows).items()}
    return files


def svg_files(rows: Sequence[Row]) -> dict[str, str]:
    """Return the charts of a comparison as SVG, by the name of their file; none if nothing was measured."""
    from vivace.answers.page import svg_of

    title = plain(title_of(rows[0].record))
    bars = times(rows)
    files = {} if bars is None else {"times.svg": svg_of(title, bars)}
    for plot in plots(rows):
        name = "-".join(plot.title.lower().split())
        files[f"{name}.svg"] = svg_of(f"{title}: {plot.title}", plot)
    return files


def _runs(
    folders: Sequence[Path], limits: Limits, price_per_hour: float | None
) -> list[tuple[Compared, list[Row]]]:
    runs = []
    with ExitStack() as stack:
        for folder in dict.fromkeys(folders):
            store = stack.enter_context(Store.read_only(folder))
            # Within a command, models and batches are in the order of the command line.
            for _, group in groupby(
                store.comparisons(), key=lambda of: "" if of.run is None else of.run.command
            ):
                runs += [(of, priced(of.rows(limits), price_per_hour)) for of in reversed(list(group))]
    if not runs:
        names = " and ".join(map(str, dict.fromkeys(folders)))
        held = "have" if len(set(folders)) > 1 else "has"
        raise StoreError(f"the store {names} {held} no finished round; run `vivace bench` first")
    return runs
