"""The commands, one module each. Importing them does not import torch."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click

from vivace import __version__, is_command
from vivace.cli import options
from vivace.cli.bench import bench
from vivace.cli.bench_endpoint import bench_endpoint
from vivace.cli.calibrate import calibrate
from vivace.cli.compare import compare
from vivace.cli.contribute import contribute
from vivace.cli.demo import demo
from vivace.cli.doctor import doctor
from vivace.cli.export import export
from vivace.cli.failures import check_arguments, status_of
from vivace.cli.fresh import CommandPart
from vivace.cli.generate import generate
from vivace.cli.lint import lint
from vivace.cli.models import models
from vivace.cli.plan import plan
from vivace.cli.profile import profile
from vivace.cli.prove import prove
from vivace.cli.quality import quality
from vivace.cli.recommend import recommend
from vivace.cli.report import report
from vivace.cli.save import save
from vivace.cli.serve import serve
from vivace.cli.study import study
from vivace.cli.techniques import techniques
from vivace.cli.tune import tune
from vivace.cli.warm import warm
from vivace.foundation.untrusted.streams import plain_output


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vivace")
def app() -> None:
    """Find, prove and run the fastest recipe for a text-to-image model.

    A recipe is a list of optimisations, such as bf16+tiny_vae+steps(20); `baseline` is the model as published.
    Start with `vivace demo`.

    Exit codes: 0 success, 1 a comparison or check failed, 2 invalid usage or recipe, 3 this machine, model or file does
    not allow it, 4 some trials were not measured, 5 unclear (compare), 130 interrupted (finished rounds are kept).
    """


for command in (
    recommend,
    serve,
    plan,
    generate,
    bench,
    tune,
    study,
    compare,
    profile,
    report,
    export,
    save,
    warm,
    quality,
    prove,
    lint,
    contribute,
    calibrate,
    models,
    techniques,
    doctor,
    demo,
):
    app.add_command(command)
    for subcommand in command.commands.values() if isinstance(command, click.Group) else (command,):
        options.debug(subcommand)
options.debug(bench_endpoint)


def run(settings: dict[str, Any]) -> None:
    """Run the command line of this process, and exit.

    Args:
        settings: the object of its context.
    """
    # Set before any import of transformers: its advice is not part of vivace's output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    part: CommandPart | None = settings["part"]

    def command() -> object:
        if is_command and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        check_arguments(sys.argv[1:])
        return app.main(prog_name="vivace", standalone_mode=False, obj=settings)

    with plain_output():
        if part is not None:
            part.keep_silent()
        status = status_of(command, debug=lambda: settings["debug"])
        if part is not None:
            part.end()
        if is_command:  # nothing is left to interrupt
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)
