"""Options that several commands share, named as diffusers names them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vivace.errors import WorkloadError

if TYPE_CHECKING:
    from vivace.spec.limits import Limits

F = TypeVar("F", bound=Callable[..., Any])
_MAX_PROMPT_BYTES = 10_000_000

model = click.option(
    "--model",
    default="tiny-sd",
    show_default=True,
    help="Catalogue name, synthetic:NAME, org/repo[@revision], folder, file.",
)
device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU if there is one.",
)
threads = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; fixed, since pictures depend on it."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
store = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=".vivace",
    show_default=True,
    help="Folder of the records.",
)


def page(default: str) -> Callable[[F], F]:
    """Where the HTML page goes."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        default=default,
        show_default=True,
        help="The page to write.",
    )


def workload(function: F) -> F:
    """Size, steps and guidance."""
    for option in (
        click.option("--guidance-scale", type=float, help="Guidance scale; default: the model's own."),
        click.option("--num-inference-steps", type=int, help="Denoising steps; default: the model's own."),
        click.option("--width", type=int, help="Pixels; default: the model's own."),
        click.option("--height", type=int, help="Pixels; default: the model's own."),
    ):
        function = option(function)
    return function


def min_quality(function: F) -> F:
    """The limits of the quality gate."""
    return click.option(
        "--min-quality",
        "limits",
        callback=_parse_limits,
        metavar="NAME=VALUE,...",
        help="What pictures must keep of the baseline's, e.g. clip=0.97,ssim=0.8,psnr_db=30; off switches one off.",
    )(function)


def _parse_limits(context: click.Context, parameter: click.Parameter, value: str | None) -> Limits | None:
    if value is None:
        return None
    from pydantic import ValidationError

    from vivace.spec.limits import Limits

    given: dict[str, float | None] = {}
    names = ", ".join(Limits.model_fields)
    for part in value.split(","):
        name, separator, number = (text.strip() for text in part.partition("="))
        if not separator or name not in Limits.model_fields:
            raise click.BadParameter(f"{part.strip()!r} is not NAME=VALUE with a NAME of {names}.")
        try:
            given[name] = None if number == "off" else float(number)
        except ValueError:
            raise click.BadParameter(f"{number!r} for {name} is neither a number nor off.") from None
    try:
        return Limits(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        raise click.BadParameter(f"{problem['loc'][0]}={problem['input']}: {problem['msg']}.") from None


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, UTF-8; blank lines are skipped.

    Raises:
        WorkloadError: no such file, not text, or no prompt in it.
    """
    try:
        if path.stat().st_size > _MAX_PROMPT_BYTES:
            raise WorkloadError(f"--prompts {path}: larger than {_MAX_PROMPT_BYTES // 10**6} MB")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WorkloadError(
            f"--prompts {path}: {error.strerror}; give a text file with one prompt a line"
        ) from None
    except UnicodeDecodeError:
        raise WorkloadError(
            f"--prompts {path}: not UTF-8 text; give a text file with one prompt a line"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise WorkloadError(f"--prompts {path}: no prompt in it; write one prompt a line")
    return prompts


def command_line() -> str:
    """The line that reproduces this invocation."""
    return shlex.join(["vivace", *sys.argv[1:]])
