"""vivace report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from vivace.cli.command import command
from vivace.errors import UsageError
from vivace.foundation.spec.limits import MinQuality
from vivace.foundation.spec.settings import DEFAULT_STORE, FILE, Option, PricePerHour, Settings
from vivace.foundation.untrusted.destinations import check_folder, check_writable, is_standard_output, replace


class ReportCommand(Settings):
    stores: Annotated[
        tuple[Path, ...], Option("Folder of records; repeat to show several on one page.", "--store")
    ] = (Path(DEFAULT_STORE),)
    output: Annotated[
        Path | None,
        Option(
            "File to write; default: page.html, and standard output for other formats than html.",
            "-o --output",
            metavar="FILE",
            path=FILE,
        ),
    ] = None
    format_: Annotated[
        Literal["html", "table", "md", "latex", "csv", "json"],
        Option("html is the page; the others are its tables; latex needs booktabs.", "--format"),
    ] = "html"
    charts: Annotated[
        Path | None,
        Option(
            "Also write each run's charts into a folder, as SVG files.",
            metavar="FOLDER",
            path={"file_okay": False},
        ),
    ] = None
    title: Annotated[str | None, Option("Title of the page.", metavar="TEXT")] = None
    limits: MinQuality = None
    price_per_hour: PricePerHour = None


@command(ReportCommand)
def report(settings: ReportCommand) -> int:
    """Write a store's results as one offline HTML page, or as tables.

    The page has each run's verdict, table, charts and images, and the tables as CSV and JSON files to save; the newest
    run comes first. It needs no network, and writing it needs no torch.

    \b
        vivace report -o page.html --charts charts
        vivace report --format csv -o rows.csv
    """
    from vivace.answers.data import written
    from vivace.answers.page import page_of
    from vivace.benchmark.run import answer_of_stores, charts_of_stores
    from vivace.foundation.spec.limits import DEFAULT_LIMITS

    if settings.title is not None and settings.format_ != "html":
        raise UsageError(f"--title is the page's; leave it out with --format {settings.format_}")
    path = settings.output or Path("page.html" if settings.format_ == "html" else "-")
    check_writable(path)
    if settings.charts is not None:
        check_folder(settings.charts)
    used = settings.limits or DEFAULT_LIMITS
    is_page = settings.format_ == "html"
    answer = answer_of_stores(settings.stores, used, settings.price_per_hour, settings.title)
    content = page_of(answer) if is_page else written(answer, settings.format_)
    if is_standard_output(path) and not is_page:
        click.echo(content, nl=False)
    else:
        replace(path, content.encode())
        click.echo(path, err=is_standard_output(path))
    if settings.charts is not None:
        for name, svg in charts_of_stores(settings.stores, used, settings.price_per_hour).items():
            replace(settings.charts / name, svg.encode())
            click.echo(settings.charts / name, err=is_standard_output(path))
    return 0
