"""Command line: one module per command. Importing it does not import torch."""

from __future__ import annotations

import os
import sys

import click

from vivace import __version__
from vivace.cli.bench import bench
from vivace.cli.calibrate import calibrate
from vivace.cli.demo import demo
from vivace.cli.doctor import doctor
from vivace.cli.export import export
from vivace.cli.generate import generate
from vivace.cli.models import models
from vivace.cli.plan import plan
from vivace.cli.quality import quality
from vivace.cli.report import report
from vivace.cli.techniques import techniques
from vivace.errors import VivaceError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vivace")
def app() -> None:
    """Find, prove and run the fastest recipe for a text-to-image model.

    A recipe is a list of optimisations, such as bf16+tiny_vae+steps(20); `baseline` is the model as published.
    Start with `vivace demo`.

    Exit codes: 0 success, 1 a quality comparison failed, 2 invalid usage or recipe, 3 this machine, model or file does
    not allow it, 4 some trials were not measured, 130 interrupted (finished rounds are kept).
    """


for command in (plan, generate, bench, report, export, quality, calibrate, models, techniques, doctor, demo):
    app.add_command(command)


def main() -> None:
    """Run the `vivace` command. Errors that a user can cause print one message, never a traceback."""
    # Set before any import of transformers: its advice is not part of vivace's output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = app.main(prog_name="vivace", standalone_mode=False)
    except click.exceptions.Abort:
        status = INTERRUPTED
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except KeyboardInterrupt:
        click.echo("\nvivace: interrupted", err=True)
        status = INTERRUPTED
    except VivaceError as error:
        click.echo(f"vivace: {error}", err=True)
        status = error.exit_code
    except BrokenPipeError:
        # `vivace models | head`: without this, the interpreter reports the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"vivace: {where}{error.strerror or error}", err=True)
        status = VivaceError.exit_code
    sys.exit(status if isinstance(status, int) else 0)
