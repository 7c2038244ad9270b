"""vivace report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.errors import UsageError
from vivace.foundation.untrusted.destinations import check_folder, check_writable, is_standard_output, replace

if TYPE_CHECKING:
    from vivace.foundation.spec.limits import Limits

FORMATS = ("table", "md", "csv", "json")


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
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write; default: page.html, and standard output for other formats than html.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["html", *FORMATS]),
    default="html",
    show_default=True,
    help="html is the page; the others are its tables.",
)
@click.option(
    "--charts",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Also write each run's charts into a folder, as SVG files.",
)
@click.option("--title", metavar="TEXT", help="Title of the page.")
@options.min_quality
@options.price
def report(
    stores: tuple[Path, ...],
    output: Path | None,
    format_: str,
    charts: Path | None,
    title: str | None,
    limits: Limits | None,
    price_per_hour: float | None,
) -> int:
    """Write a store's results as one offline HTML page, or as tables.

    The page has each run's verdict, table, charts and images, and the tables as CSV and JSON files to save; the newest
    run comes first. It needs no network, and writing it needs no torch.

    \b
        vivace report -o page.html --charts charts
        vivace report --format csv -o rows.csv
    """
    from vivace.answers.data import written
    from vivace.answers.page import page_of
    from vivace.benchmark.stored_answer import answer_of_stores, charts_of_stores
    from vivace.foundation.spec.limits import DEFAULT_LIMITS

    if title is not None and format_ != "html":
        raise UsageError(f"--title is the page's; leave it out with --format {format_}")
    path = output or Path("page.html" if format_ == "html" else "-")
    check_writable(path)
    if charts is not None:
        check_folder(charts)
    used = limits or DEFAULT_LIMITS
    is_page = format_ == "html"
    answer = answer_of_stores(stores, used, price_per_hour, title)
    content = page_of(answer) if is_page else written(answer, format_)
    if is_standard_output(path) and not is_page:
        click.echo(content, nl=False)
    else:
        replace(path, content.encode())
        click.echo(path, err=is_standard_output(path))
    if charts is not None:
        for name, svg in charts_of_stores(stores, used, price_per_hour).items():
            replace(charts / name, svg.encode())
            click.echo(charts / name, err=is_standard_output(path))
    return 0
