"""The commands, one module each, imported when it is used. Importing this imports neither torch nor pydantic."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from vivace import __version__, is_command
from vivace.cli.watched.failures import check_arguments, status_of
from vivace.cli.watched.fresh import CommandPart, settings_of
from vivace.foundation.untrusted.streams import plain_output

_MEASURING = ("bench", "calibrate", "compare", "demo", "profile", "prove", "quality", "study", "tune")
_OTHERS = (
    "contribute",
    "doctor",
    "export",
    "generate",
    "lint",
    "merge",
    "models",
    "plan",
    "recommend",
    "report",
    "save",
    "serve",
    "techniques",
    "warm",
)
COMMANDS = tuple(sorted((*_MEASURING, *_OTHERS)))


class Commands(click.Group):
    """A group whose commands are imported when they are used; its help reads their first sentences from the source."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context | None, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = "measuring." * (name in _MEASURING) + name
        command = getattr(importlib.import_module(f"vivace.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name).get_short_help_str(limit)) for name in COMMANDS])


def _summary(name: str) -> click.Command:
    """Return a command that has only the docstring of its function, which is not imported."""
    file = Path(__file__).parent / ("measuring" if name in _MEASURING else "") / f"{name}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return click.Command(name, help=ast.get_docstring(next(functions)))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vivace")
def app() -> None:
    """Find, prove and run the fastest recipe for a text-to-image model.

    A recipe is a list of optimisations, such as bf16+tiny_vae+steps(20); `baseline` is the model as published.
    Start with `vivace demo`.

    Exit codes: 0 success, 1 a comparison or check failed, 2 invalid usage or recipe, 3 this machine, model or file does
    not allow it, 4 some trials were not measured, 5 unclear (compare), 130 interrupted (finished rounds are kept).
    """


def run(settings: dict[str, Any]) -> None:
    """Run the command line of this process, and exit."""
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


if __name__ == "__main__":  # the process that does a part of a command, see `vivace.cli.watched.fresh`
    from vivace.foundation.processes.resident import die_with_parent  # imports pydantic

    die_with_parent()
    number, is_read, *arguments = sys.argv[1:]
    sys.argv = ["vivace", *arguments]
    run(settings_of(arguments, CommandPart(int(number), Path(is_read))))
