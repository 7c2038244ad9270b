"""vivace merge"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from vivace.cli.command import command
from vivace.foundation.spec.settings import Option, Positional, Settings


class MergeCommand(Settings):
    stores: Annotated[tuple[Path, ...], Field(min_length=1), Positional()]
    output: Annotated[Path, Option("Folder of the new store.", "-o --output", path={"file_okay": False})]


@command(MergeCommand)
def merge(settings: MergeCommand) -> int:
    """Put the records and images of STORES into one new store.

    Runs stay apart, as on their own machines: rows are compared with the baseline of their own run alone. Where two
    stores measured the same trial on the same machine, the rounds of both are kept, and reports of its runs show the
    latest. The stores themselves are only read, and all that went in is counted against what came out.

    \b
        vivace merge laptop-store h100-store -o all
        vivace report --store all
    """
    from vivace.benchmark.store.contributing import merge_stores

    counts = merge_stores(settings.stores, settings.output)
    click.echo(f"wrote {settings.output}: {', '.join(f'{number} {name}' for name, number in counts.items())}")
    return 0
