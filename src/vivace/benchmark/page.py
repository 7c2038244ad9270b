"""The HTML page of everything that stores hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

from vivace.benchmark.pictures import picture_path
from vivace.benchmark.schedule import comparable
from vivace.benchmark.store import Invocation, Store
from vivace.errors import StoreError
from vivace.report.page import Section, render_page
from vivace.report.rows import priced, rows_of
from vivace.spec.limits import DEFAULT_LIMITS, Limits


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
        sections = [section for store in stores for section in _sections(store, limits, price_per_hour)]
        if not sections:
            names = " and ".join(map(str, folders))
            held = "have" if len(stores) > 1 else "has"
            raise StoreError(f"the store {names} {held} no finished round; run `vivace bench` first")

        def read_picture(sha256: str) -> bytes | None:
            for store in stores:
                for path in (store.picture_path(sha256), picture_path(store.folder / "sources", sha256)):
                    with suppress(OSError):
                        return path.read_bytes()
            return None

        return render_page(sections, read_picture, title)


def _sections(store: Store, limits: Limits, price_per_hour: float | None) -> list[Section]:
    runs: dict[tuple[str, ...], Invocation] = {}
    for run in reversed(store.runs()):
        runs.setdefault(run.keys, run)  # a repeated or resumed run is shown once, at its latest start
    sections = []
    # Within a command, models and batches are in the order of the command line.
    for _, group in groupby(runs.values(), key=lambda run: run.command):
        for run in reversed(list(group)):
            if records := comparable([store.record(key) for key in run.keys], run.rounds):
                rows = priced(rows_of(records, store.quality_pass(run), limits), price_per_hour)
                sections.append(Section(run.command, run.started_at, tuple(rows)))
    return sections
