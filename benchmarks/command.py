"""Run a script's command as `vivace` runs its own: errors are one message and an exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from vivace.errors import VivaceError

INTERRUPTED = 130


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """The exit code.

    Args:
        arguments: None for those of the command line.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo("\ninterrupted; what is in the record stays, the same command goes on from here", err=True)
        return INTERRUPTED
    except VivaceError as error:
        click.echo(f"{command.name}: {error}", err=True)
        return error.exit_code
    return status if isinstance(status, int) else 0
