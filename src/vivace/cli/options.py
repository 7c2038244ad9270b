"""Options that several commands share, with the names that diffusers uses."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from vivace.cli.spec_options import QUALITY, TIMING, WORKLOAD, SpecCommand, option
from vivace.cli.spec_options import FiniteFloat as FiniteFloat
from vivace.cli.spec_options import command as command
from vivace.errors import UsageError, WorkloadError
from vivace.foundation.spec.task_names import TASKS
from vivace.foundation.untrusted.files import read_text, reading, user_path
from vivace.foundation.untrusted.streams import lines_of

if TYPE_CHECKING:
    from vivace.foundation.spec.limits import Limits

F = TypeVar("F", bound=Callable[..., Any])
_MAX_PROMPT_BYTES = 10_000_000
_MAX_PROMPTS = 10_000
_ELSEWHERE = ("ray", "ray_address", "endpoint", "dry_run", "replicas")
_LOADS_NOTHING = ("study", "doctor", "techniques")
MAX_SEED = 2**63 - 1


def parse_repeats(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """Return None for `auto`, or a whole number."""
    if value == "auto":
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 10_000:
        raise click.BadParameter(f"{value!r} is not 'auto' or a whole number from 1 to 10000.")
    return int(value)


def model_or(default: str) -> Callable[[F], F]:
    """Return the option for a model, with a default."""
    return click.option(
        "--model",
        default=default,
        show_default=True,
        help="Model name, synthetic:NAME, org/repo[@revision], folder or file.",
    )


model = model_or("tiny-sd")
device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "xpu", "mps"]),
    default="auto",
    show_default=True,
    help="Where to run; auto: a GPU if there is one. cuda: NVIDIA or AMD, xpu: Intel, mps: Apple.",
)
threads = option(TIMING, "threads")
repeats = option(
    TIMING,
    "repeats",
    callback=parse_repeats,
    type=str,
    default="auto",
    show_default=True,
    metavar="auto|N",
)
warmup = option(TIMING, "max_warmup", "--warmup")
timeout = option(TIMING, "timeout_s", "--timeout")
text = option(WORKLOAD, "text")
seed = option(WORKLOAD, "seed", type=click.IntRange(0, MAX_SEED))
batch = option(
    WORKLOAD,
    "batches",
    "--batch",
    type=click.IntRange(1, 4096),
    default=1,
    callback=lambda _context, _option, number: (number,),
    help="Images per call.",
)


def text_or_json(thing: str) -> Callable[[F], F]:
    """Return the option --format of a command that answers in sentences."""
    return click.option(
        "--format",
        "format_",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help=f"Format of the {thing} on standard output.",
    )


results_format = click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "csv", "md"]),
    default="table",
    show_default=True,
    help="Format of the results on standard output.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
store = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=".vivace",
    show_default=True,
    help="Folder of records.",
)


price = click.option(
    "--price-per-hour",
    type=FiniteFloat(0, 1_000_000, min_open=True),
    metavar="PRICE",
    help="Price of an hour of this machine, in any currency: adds the cost of 1,000 images.",
)


def debug(command: click.Command) -> None:
    """Add the option for tracebacks, which every command has, to a command."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    option = click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Print the traceback of an error.",
    )
    if isinstance(command, SpecCommand):
        command.add(option)
    else:
        command.params.append(option)


def page(default: str) -> Callable[[F], F]:
    """Option for the HTML page to write."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        default=default,
        show_default=True,
        help="Page to write.",
    )


def workload(function: F) -> F:
    """Add the options for size, steps and guidance."""
    for add in (
        option(WORKLOAD, "guidance_scale", metavar="FLOAT"),
        option(WORKLOAD, "num_inference_steps", "--num-inference-steps", "--steps", metavar="INTEGER"),
        option(WORKLOAD, "width", metavar="INTEGER"),
        option(WORKLOAD, "height", metavar="INTEGER"),
    ):
        function = add(function)
    return function


def prompts(*, first: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds --prompt and --prompts, as one parameter: `prompts`, a list or None.

    Args:
        first: only the first prompt is used.
    """
    only = "; the first is used" if first else ""
    more = "" if first else "; repeat for more"

    def add(function: F) -> F:
        @functools.wraps(function)
        def with_prompts(*args: Any, prompt: Sequence[str], prompts_file: Path | None, **others: Any) -> Any:
            if prompt and prompts_file is not None:
                raise click.UsageError("give --prompt TEXT or --prompts FILE, not both.")
            texts = list(prompt) or (None if prompts_file is None else read_prompts(prompts_file))
            return function(*args, prompts=texts[:1] if first and texts else texts, **others)

        for add_option in (
            click.option(
                "--prompts",
                "prompts_file",
                type=click.Path(path_type=Path),
                help=f"Text file, one prompt per line{only}.",
            ),
            click.option("--prompt", multiple=True, metavar="TEXT", help=f"A prompt{more}."),
        ):
            with_prompts = add_option(with_prompts)
        return cast("F", with_prompts)

    return add


task = click.option(
    "--task",
    type=click.Choice(TASKS),
    help="What images are made from; default: decided by the files. Without files, images that ship with vivace are "
    "used.",
)


Sources = dict[str, Any]
"""The source images of a call: fields of `WorkloadRequest`, as `source_images` adds them."""
_FILES = ("images", "masks", "controls")
_HOW_TO_DRAW = (
    option(WORKLOAD, "strength", metavar="FLOAT"),
    option(WORKLOAD, "controlnet", metavar="NAME"),
)


def source_images(
    *, several: bool = False, with_task: bool = True, each: str = "prompt", drawn: bool = False
) -> Callable[[F], F]:
    """Return a decorator that adds the options for the images to start from, as one parameter, `sources`.

    Args:
        several: each file option may be repeated, one for `each` prompt.
        with_task: add the option for the task, for commands that need no files.
        drawn: the images exist already, so that only their source images can be named.
    """
    more = f" Repeat to give each {each} its own." if several else ""
    kinds = _FILES[:2] if drawn else _FILES
    names = {f"--{kind[:-1]}": kind for kind in kinds}
    helps = {
        "--image": "Source image: for image-to-image, for inpainting (with --mask), or for models that edit.",
        "--mask": "Mask for --image, of the same size: white is repainted, black stays.",
        "--control": "Image that the ControlNet follows, of the kind it was trained on: edges, depth, ...",
    }
    options = [task] if with_task else []
    options += [
        click.option(flag, names[flag], multiple=several, metavar="FILE", help=helps[flag] + more)
        for flag in names
    ]
    if not drawn:
        options += _HOW_TO_DRAW
    settings = () if drawn else ("strength", "controlnet")
    collected = (*kinds, *settings, *(("task",) if with_task else ()))

    def add(function: F) -> F:
        @functools.wraps(function)
        def with_sources(*args: Any, **others: Any) -> Any:
            sources: Sources = {name: others.pop(name) for name in collected}
            for name in kinds:
                files = sources[name]
                sources[name] = () if files is None else (files,) if isinstance(files, str) else files
            return function(*args, sources=sources, **others)

        for add_option in reversed(options):
            with_sources = add_option(with_sources)
        return cast("F", with_sources)

    return add


scorer = option(
    QUALITY,
    "scorer",
    metavar="NAME",
    callback=lambda _context, _option, name: None if name == "none" else name,
)
witness = option(QUALITY, "witness", metavar="NAME")


def min_quality(function: F) -> F:
    """Add the option for the limits of the quality gate."""
    return click.option(
        "--min-quality",
        "limits",
        callback=_parse_limits,
        metavar="NAME=VALUE,...",
        help="Quality limits against the baseline, e.g. clip=0.97,match=0.95,psnr_db=30; NAME=off removes one.",
    )(function)


def _parse_limits(context: click.Context, parameter: click.Parameter, value: str | None) -> Limits | None:
    if value is None:
        return None
    from pydantic import ValidationError

    from vivace.foundation.spec.input_errors import expectation_of
    from vivace.foundation.spec.limits import Limits

    limits: dict[str, float | None] = {}
    names = ", ".join(Limits.model_fields)
    for part in value.split(","):
        name, separator, number = (text.strip() for text in part.partition("="))
        if not separator or name not in Limits.model_fields:
            raise click.BadParameter(f"{part.strip()!r} is not NAME=VALUE; NAME is one of {names}.")
        try:
            limits[name] = None if number == "off" else float(number)
        except ValueError:
            raise click.BadParameter(f"{number!r} for {name} is not a number or off.") from None
    try:
        return Limits(**limits)
    except ValidationError as error:
        problem = error.errors()[0]
        raise click.BadParameter(f"{problem['loc'][0]}={problem['input']} {expectation_of(error)}.") from None


def read_key(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the key in the file that an option names.

    Raises:
        UsageError: it cannot be read, or holds no key.
    """
    if value is None:
        return None
    with reading(f"{parameter.opts[0]} {value}", UsageError):
        key = read_text(user_path(value), 10_000).strip()
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise UsageError(
            f"{parameter.opts[0]} {value}: it has no key in it; write the key as one word on one line"
        )
    return key


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line, UTF-8; blank lines are skipped.

    Raises:
        WorkloadError: there is no such file, it is not text, or it has no prompts.
    """
    with reading(f"--prompts {path}", WorkloadError, "give a text file with one prompt per line", problem=""):
        text = read_text(path, _MAX_PROMPT_BYTES)
    prompts = [line.strip() for line in lines_of(text) if line.strip()]
    if not prompts:
        raise WorkloadError(f"--prompts {path}: no prompt in it; write one prompt per line")
    if len(prompts) > _MAX_PROMPTS:
        raise WorkloadError(f"--prompts {path}: {len(prompts):,} prompts; give at most {_MAX_PROMPTS:,}")
    return prompts


def check_first(command: click.Command) -> None:
    """Let a command say at once if this machine lacks its device, or cannot load its model.

    Commands that end elsewhere, on a cluster or at an endpoint, or load nothing, are left alone; `tune` asks for more.
    """
    inner = command.callback
    assert inner is not None

    @functools.wraps(inner)
    def checked(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and command.name != "tune" and not any(kwargs.get(name) for name in _ELSEWHERE):
            from vivace.architectures import CATALOGUE
            from vivace.tuning.readiness import check_runs_here

            sides = [str(kwargs[name]).partition(":")[0] for name in ("a", "b") if name in kwargs]
            several = kwargs.get("models") or ()  # of which one that cannot run is a row that says so
            models = [kwargs.get("model"), *(several if len(several) == 1 else ())]
            models += [side for side in sides if side in CATALOGUE]
            for model in models if command.name not in _LOADS_NOTHING else [None]:
                check_runs_here(model, device)
        return inner(*args, **kwargs)

    command.callback = checked


def command_line() -> str:
    """Return the command line that was typed, as text that can be stored."""
    return shlex.join(["vivace", *sys.argv[1:]])


def parse_gpus(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | Literal["all"] | None:
    """Return a number of GPUs, or "all"; None if none was given."""
    if value is None or value == "all":
        return "all" if value else None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 1024:
        raise click.BadParameter(f"{value!r} is not 'all' or a whole number from 1 to 1024.")
    return int(value)


def places(function: Callable[..., int]) -> Callable[..., int]:
    """Add --gpus and --ray."""
    ray = click.option(
        "--ray",
        metavar="ADDRESS",
        help="Spread the recipes over a Ray cluster: HOST:PORT, auto for the one of this host, local to start one "
        "here.",
    )
    gpus = click.option(
        "--gpus",
        callback=parse_gpus,
        metavar="N|all",
        help="Spread the recipes over this many GPUs of this host; each measures its own baseline and has its own "
        "table.",
    )
    return gpus(ray(function))
