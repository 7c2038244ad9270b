"""vivace report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.cli.output import check_writable, replace

if TYPE_CHECKING:
    from vivace.spec.limits import Limits


@click.command()
@options.store
@options.page("page.html")
@options.min_quality
def report(store: Path, output: Path, limits: Limits | None) -> int:
    """Write a store's results as one offline HTML page.

    The page has each run's verdict, table, charts and images; the newest run comes first. It needs no network, and
    writing it needs no torch.
    """
    click.echo(write_page(store, output, limits))
    return 0


def write_page(store: Path, output: Path, limits: Limits | None = None) -> Path:
    """Write the page of all runs in a store, atomically; return its path."""
    from itertools import groupby

    from vivace.benchmark.store import Invocation, Store
    from vivace.errors import StoreError
    from vivace.report.page import Section, render_page
    from vivace.report.rows import rows_of
    from vivace.spec.limits import DEFAULT_LIMITS

    check_writable(output.parent, output)
    with Store.read_only(store) as opened:
        runs: dict[tuple[str, ...], Invocation] = {}
        for run in reversed(opened.runs()):
            runs.setdefault(run.keys, run)  # a repeated or resumed run is shown once, at its latest start
        sections = []
        # The newest command first; within a command, models and batches in the order of the command line.
        for _, group in groupby(runs.values(), key=lambda run: run.command):
            for run in reversed(list(group)):
                records = [record for record in map(opened.record, run.keys) if record is not None]
                if records:
                    rows = rows_of(records, opened.quality_pass(run), limits or DEFAULT_LIMITS)
                    sections.append(Section(run.command, run.started_at, tuple(rows)))
        if not sections:
            raise StoreError(f"the store {store} has no finished round; run `vivace bench` first")

        def read_picture(sha256: str) -> bytes | None:
            try:
                return opened.picture_path(sha256).read_bytes()
            except OSError:
                return None

        page = render_page(sections, read_picture)
    replace(output, page.encode())
    return output
