"""vivace report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.foreign.destinations import check_writable, is_standard_output, replace

if TYPE_CHECKING:
    from vivace.spec.limits import Limits


@click.command()
@click.option(
    "--store",
    "stores",
    type=click.Path(path_type=Path),
    multiple=True,
    default=(".vivace",),
    show_default=True,
    help="Folder of records; repeat to show several on one page.",
)
@options.page("page.html")
@click.option("--title", metavar="TEXT", help="Title of the page.")
@options.min_quality
@options.price
def report(
    stores: tuple[Path, ...], output: Path, title: str | None, limits: Limits | None, price: float | None
) -> int:
    """Write a store's results as one offline HTML page.

    The page has each run's verdict, table, charts and images, and the tables as CSV and JSON files to save; the newest
    run comes first. It needs no network, and writing it needs no torch.
    """
    from vivace.benchmark.page import page_of
    from vivace.spec.limits import DEFAULT_LIMITS

    check_writable(output)
    replace(output, page_of(stores, limits or DEFAULT_LIMITS, price, title).encode())
    click.echo(output, err=is_standard_output(output))
    return 0
