"""Messages and exit codes of failures on the command line."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import click

from vivace.errors import UsageError, VivaceError
from vivace.foundation.untrusted.files import is_out_of_memory, reason
from vivace.foundation.untrusted.streams import discard, standard_output

INTERRUPTED = 130
OWN_FAULT = 70


def status_of(command: Callable[[], object], *, debug: Callable[[], bool] = lambda: False) -> int:
    """Run a command and return its exit code.

    Errors that a user can cause print one message; a traceback only if `debug` says so.
    """
    try:
        status = command()
        return status if isinstance(status, int) else 0
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        _hinted(error).show()
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("\nvivace: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # `vivace models | head`: without this, the interpreter reports the closed pipe at exit.
        discard(standard_output())
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary
        message, status = _explained(error)
        if message is None or debug():
            traceback.print_exc()
        click.echo(
            f"vivace: {message or 'this is a mistake in vivace; please report it with the lines above'}",
            err=True,
        )
        return status


def check_arguments(arguments: list[str]) -> None:
    """Raise UsageError for an argument that is not text: bytes that are not UTF-8 can be neither stored nor printed."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            readable = argument.encode(errors="backslashreplace").decode()
            raise UsageError(
                f"'{readable[:200]}' is not UTF-8 text; rename the file, or type it again"
            ) from None


def _hinted(error: click.ClickException) -> click.ClickException:
    """Point to --model, where the model was typed as an argument of a command that has that option."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or not error.message.startswith("Got unexpected extra argument"):
        return error
    if not any("--model" in parameter.opts for parameter in context.command.params):
        return error
    hint = f"{context.command.name} takes the model as an option: --model NAME"
    return click.UsageError(f"{error.message.rstrip('.')}. {hint}", context)


def _explained(error: Exception) -> tuple[str | None, int]:
    """Return the message and the exit code; no message for a bug in vivace."""
    if isinstance(error, VivaceError):
        return str(error), error.exit_code
    if is_out_of_memory(error):
        advice = "give a smaller model, size or batch, or a recipe with offload or quantize"
        return f"out of memory ({reason(error)}); {advice}", VivaceError.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", VivaceError.exit_code
    return None, OWN_FAULT
