"""The contents of stores as an HTML page, as tables, and as charts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Compared
from vivace.benchmark.store.images import image_path
from vivace.errors import StoreError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.untrusted.streams import plain
from vivace.report.charts import charts
from vivace.report.page import Section, render_page
from vivace.report.rows import priced
from vivace.report.summary import summary
from vivace.report.table import render


def page_of(
    folders: Sequence[Path],
    limits: Limits = DEFAULT_LIMITS,
    price_per_hour: float | None = None,
    title: str | None = None,
) -> str:
    """Return the page of all runs in the stores as HTML; the newest command of each store comes first.

    Args:
        price_per_hour: of the machine, to show what images cost.
        title: of the page; None for one that names the model and the device.

    Raises:
        StoreError: a folder is not a store, or none has a finished round.
    """
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.read_only(folder)) for folder in dict.fromkeys(folders)]
        sections = _all_sections(stores, limits, price_per_hour)

        def read_image(sha256: str) -> bytes | None:
            for store in stores:
                for path in (store.image_path(sha256), image_path(store.folder / "sources", sha256)):
                    with suppress(OSError):
                        return path.read_bytes()
            return None

        return render_page(sections, read_image, title)


def tables_of(
    folders: Sequence[Path],
    format_: str,
    limits: Limits = DEFAULT_LIMITS,
    price_per_hour: float | None = None,
) -> str:
    """Return the tables of all runs in the stores as text, in the order of the page; see `page_of`.

    Args:
        format_: "table" or "md", with each run's conclusion; "csv" or "json", with the rows of all runs.
    """
    sections = _read(folders, limits, price_per_hour)
    if format_ in ("csv", "json"):
        return render([row for section in sections for row in section.rows], format_)
    mark = "## " if format_ == "md" else ""
    return "\n".join(
        f"{mark}{title_of(section.rows[0].record)}\n\n{render(section.rows, format_)}\n{summary(section.rows)}\n"
        for section in sections
    )


def charts_of(
    folders: Sequence[Path], limits: Limits = DEFAULT_LIMITS, price_per_hour: float | None = None
) -> dict[str, str]:
    """Return the charts of all runs in the stores as SVG, by the names of their files; see `page_of`."""
    files = {}
    for number, section in enumerate(_read(folders, limits, price_per_hour), 1):
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", section.rows[0].model).strip("-.")[-60:]
        for name, svg in charts(section.rows).items():
            files[f"{number}-{model}-{name}"] = svg
    return files


def title_of(record: Record) -> str:
    """Return what a run's rows have in common: the model, the device, and its place if there are several."""
    environment = record.environment
    place = f", {environment.place.name}" if environment.place is not None else ""
    batch = f", batch {record.trial.workload.batch}" if record.trial.workload.batch > 1 else ""
    return plain(f"{record.trial.model.name}{batch} on {environment.device_name}{place}")


def _read(folders: Sequence[Path], limits: Limits, price_per_hour: float | None) -> list[Section]:
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.read_only(folder)) for folder in dict.fromkeys(folders)]
        return _all_sections(stores, limits, price_per_hour)


def _all_sections(stores: Sequence[Store], limits: Limits, price_per_hour: float | None) -> list[Section]:
    """Return the runs of all stores.

    Raises:
        StoreError: none has a finished round.
    """
    sections = [section for store in stores for section in _sections(store, limits, price_per_hour)]
    if not sections:
        names = " and ".join(str(store.folder) for store in stores)
        held = "have" if len(stores) > 1 else "has"
        raise StoreError(f"the store {names} {held} no finished round; run `vivace bench` first")
    return sections


def _sections(store: Store, limits: Limits, price_per_hour: float | None) -> list[Section]:
    sections = []
    # Within a command, models and batches are in the order of the command line.
    for _, group in groupby(store.comparisons(), key=_command_of):
        for compared in reversed(list(group)):
            rows = priced(compared.rows(limits), price_per_hour)
            assert compared.run is not None
            sections.append(Section(compared.run.command, compared.run.started_at, tuple(rows)))
    return sections


def _command_of(compared: Compared) -> str:
    return "" if compared.run is None else compared.run.command
