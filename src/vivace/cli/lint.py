"""vivace lint"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from vivace.cli.command import command
from vivace.foundation.spec.settings import Option, Positional, Settings, Steps
from vivace.foundation.untrusted.streams import plain

if TYPE_CHECKING:
    from vivace.evidence.lint.findings import Finding

IMPOSSIBLE = 1


class LintCommand(Settings):
    files: Annotated[tuple[Path, ...], Positional()]
    model: Annotated[str | None, Option("Model of rows that name none, for the limit of the chip.")] = None
    gpu: Annotated[
        str | None, Option("GPU of rows that name none, as for vivace recommend.", metavar="NAME")
    ] = None
    steps: Annotated[
        Steps, Option("Denoising steps of rows that name none.", "--steps", metavar="INTEGER")
    ] = None
    format_: Annotated[Literal["table", "json"], Option("Format on standard output.", "--format")] = "table"


@command(LintCommand)
def lint(settings: LintCommand) -> int:
    """Find impossible and doubtful rows in tables of latencies.

    FILES are CSV, TSV, Markdown (also .txt), HTML or JSON, from any source. Columns are recognised by their headings;
    the output lists those that were read, standard error those that were not. Impossible: figures that contradict
    each other or the chip, such as a mean below the minimum. Doubtful: figures that do not show what they seem to,
    such as a p99 of ten samples. Rounding is allowed for.

    Exit codes: 0 nothing impossible, 1 something impossible; others as for all commands.

    \b
        vivace lint README.md results.csv
        vivace lint timings.csv --model flux-dev --gpu H100 --steps 28 --format json
    """
    from vivace.evidence.lint.check import checked, merged
    from vivace.evidence.lint.read_tables import read_tables
    from vivace.foundation.hardware import named_gpu

    gpu = None if settings.gpu is None else named_gpu(settings.gpu).chip.name
    columns = {
        name: str(value)
        for name, value in (("model", settings.model), ("gpu", gpu), ("steps", settings.steps))
        if value is not None
    }
    findings = []
    for file in settings.files:
        tables = read_tables(file)
        done = [checked(table, columns) for table in tables]
        findings += [finding for table in done for finding in table.findings]
        if not any(table.rows for table in tables):
            is_text = file.suffix.lower() in (".md", ".txt")
            more = "; times in sentences are not read" if is_text else ", and nothing was checked"
            click.echo(f"vivace: warning: {file}: no table in it{more}", err=True)
        elif not any(table.coverage.figures for table in done):
            click.echo(f"vivace: warning: {file}: nothing was checked, as no figure in it was read", err=True)
        for part in merged(table.coverage for table in done if table.coverage.place is not None):
            if part.figures:
                click.echo(plain(f"{part.where}: {part.read_in_words()}"), err=settings.format_ == "json")
            for line in part.warnings():
                click.echo(plain(f"{part.where}: {line}"), err=True)
    wrong = [finding for finding in findings if finding.severity == "impossible"]
    if settings.format_ == "json":
        click.echo(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(finding_text(finding))
        click.echo(
            f"{len(wrong)} impossible, {len(findings) - len(wrong)} doubtful in {len(settings.files)} "
            f"{'file' if len(settings.files) == 1 else 'files'}",
            err=True,
        )
    return IMPOSSIBLE if wrong else 0


def finding_text(finding: Finding) -> str:
    where = (
        f"{finding.file}:{finding.row}"
        if finding.unit == "line"
        else f"{finding.file}, {finding.unit} {finding.row}"
    )
    label = f" ({finding.label})" if finding.label else ""
    return plain(
        f"{where}{label}: {finding.severity}, {finding.rule}\n  {finding.numbers}\n"
        f"  {finding.why}; check {finding.check}"
    )
