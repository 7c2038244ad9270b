"""vivace contribute"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from vivace.cli.command import command
from vivace.errors import UsageError
from vivace.foundation.spec.settings import FILE, Option, Positional, Settings
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output, replace


class ContributeCommand(Settings):
    stores: Annotated[tuple[Path, ...], Positional()] = ()
    output: Annotated[Path, Option("File to write.", "-o --output", metavar="FILE", path=FILE)] = Path(
        "contribution.json"
    )
    sign_off: Annotated[
        bool, Option("State that the rows are your own, and that everybody may use them.")
    ] = False


@command(ContributeCommand)
def contribute(settings: ContributeCommand) -> int:
    """Write the measurements of STORES (default: .vivace) as one file for others.

    The file has the environment, the raw samples, the recipes and how close images are to the baseline's; no paths, no
    prompts, no images, no names of people or machines. Rows that need any of these, such as those of your
    own folder or LoRA, are left out and listed.

    \b
        vivace contribute --sign-off -o rtx-5070.json
    """
    from vivace.answers.formatting import size
    from vivace.benchmark.store.contributing import contribution_of
    from vivace.foundation.spec.contribution import SIGN_OFF

    if not settings.sign_off:
        raise UsageError(f"give --sign-off to state: {SIGN_OFF}")
    check_writable(settings.output)
    contribution, left_out = contribution_of(settings.stores or (Path(".vivace"),))
    content = (contribution.model_dump_json(exclude_defaults=False) + "\n").encode()
    replace(settings.output, content)
    for line in left_out:
        click.echo(f"note: left out: {line}", err=True)
    rows = sum(len(compared.rows) for compared in contribution.comparisons)
    click.echo(
        f"wrote {settings.output}: {rows} rows of {len(contribution.comparisons)} comparisons, {size(len(content))}; "
        "docs/contribute.md says where to send it",
        err=is_standard_output(settings.output),
    )
    return 0
