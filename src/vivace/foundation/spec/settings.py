"""Settings: one frozen class for a command and its function in Python. A field says how it is given on the command line
by an `Option` or `Positional` in its annotation, of which `vivace.cli.command` makes the options; others are for Python
alone."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from vivace.errors import UsageError, WorkloadError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import InputErrors, expectation_of, name_of, shorten
from vivace.foundation.spec.task_names import Device, Task
from vivace.foundation.untrusted.files import read_text, reading, user_path
from vivace.foundation.untrusted.streams import lines_of

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
MAX_SEED = 2**63 - 1
MAX_SIDE = 16_384
"""Largest width and height of an image, pixels."""
DEFAULT_STORE = ".vivace"
_MAX_PROMPT_BYTES = 10_000_000
_MAX_PROMPTS = 10_000


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line.

    Attributes:
        help: what it is.
        flags: separated by spaces, e.g. "-o --output"; empty for the field's name.
        default: as text, where it differs from the field's; empty to show none.
        path: what `click.Path` checks of a path, e.g. {"exists": True}.
        multiple: it may be repeated; None: where the field is a list that is not read from one text.
        read: what makes a value of the text, where Python takes the value itself.
        from_file: a second option that names a file to read the value from: its flag and help, and the function.
    """

    help: str = ""
    flags: str = ""
    metavar: str | None = field(default=None, kw_only=True)
    default: str | None = field(default=None, kw_only=True)
    path: dict[str, bool] = field(default_factory=dict, kw_only=True, hash=False)
    multiple: bool | None = field(default=None, kw_only=True)
    read: Callable[[str], Any] | None = field(default=None, kw_only=True)
    from_file: tuple[str, str, Callable[[Path], Any]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Positional:
    """A field that is given by its place on the command line. With a default it may be left out."""

    metavar: str | None = None


class Settings(Spec):
    """Frozen settings, whose names and values are checked."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def part(self, kind: type[R], **changes: Any) -> R:
        """Return the fields that another class has, too, as an object of it."""
        names = inspect.signature(kind).parameters
        shared = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        with InputErrors():
            return kind(**shared | changes)


def read_by(parse: Callable[[str], Any]) -> BeforeValidator:
    """Return the rule of a field that is read from text by a function, which raises ValueError; other values stay."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


class _Takes(Protocol[P]):
    @overload
    def __call__(self, function: Callable[[A, Any], R]) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, Any], R]) -> Callable[Concatenate[A, B, P], R]: ...


def takes(settings: Callable[P, Settings]) -> _Takes[P]:
    """Return a decorator of a function whose last parameter is settings: their fields become its keywords."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *first, _ = signature.parameters.values()
        fields = [
            parameter.replace(annotation=_plain_type(settings, parameter.name))
            for parameter in inspect.signature(settings).parameters.values()
        ]
        signature = signature.replace(parameters=[*first, *fields])

        @functools.wraps(function)
        def with_keywords(*args: Any, **values: Any) -> Any:
            given = signature.bind(*args, **values).arguments
            arguments = [given.pop(parameter.name) for parameter in first]
            try:
                made = settings(**given)  # type: ignore[call-arg]
            except ValidationError as error:
                wrong = f"{name_of(error)}={shorten(repr(error.errors()[0]['input']))}"
                raise UsageError(f"vivace.{function.__name__}: {wrong} {expectation_of(error)}") from None
            return function(*arguments, made)

        vars(with_keywords).update(__signature__=signature, settings=settings)
        return with_keywords

    return cast("_Takes[P]", add)


def _plain_type(settings: Any, name: str) -> str:
    """Return the type of a field as text, without its rules."""
    annotation = settings.model_fields[name].annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line, UTF-8; blank lines are skipped."""
    with reading(f"--prompts {path}", WorkloadError, "give a text file with one prompt per line", problem=""):
        text = read_text(path, _MAX_PROMPT_BYTES)
    prompts = [line.strip() for line in lines_of(text) if line.strip()]
    if not prompts:
        raise WorkloadError(f"--prompts {path}: no prompt in it; write one prompt per line")
    if len(prompts) > _MAX_PROMPTS:
        raise WorkloadError(f"--prompts {path}: {len(prompts):,} prompts; give at most {_MAX_PROMPTS:,}")
    return prompts


def read_key(path: str) -> str:
    """Return the key in a file."""
    with reading(path, UsageError):
        key = read_text(user_path(path), 10_000).strip()
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise UsageError(f"{path}: it has no key in it; write the key as one word on one line")
    return key


def as_list(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return a list as a tuple, and a single text as one of one."""
    if value is None:
        return check(value)
    return tuple(check((value,) if isinstance(value, str) else value))


def one_of_many(number: str, least: int, most: int, *words: str) -> int | str:
    """Read a whole number in a range, or one of some words."""
    if number in words:
        return number
    if not (number.isascii() and number.isdigit() and least <= int(number) <= most):
        others = "".join(f"{word!r} or " for word in words)
        raise ValueError(f"{number!r} is not {others}a whole number from {least} to {most}")
    return int(number)


Texts = Annotated[Sequence[str], WrapValidator(as_list)]
"""Several texts; a single one is a list of one."""
Prompts = Annotated[
    Sequence[str] | None,
    WrapValidator(as_list),
    Option(
        "A prompt; repeat for more.",
        "--prompt",
        metavar="TEXT",
        multiple=True,
        from_file=("--prompts", "Text file, one prompt per line.", read_prompts),
    ),
]
ModelName = Annotated[str, Option("Model name, synthetic:NAME, org/repo[@revision], folder or file.")]
DeviceName = Annotated[
    Device,
    Option("Where to run; auto: a GPU if there is one. cuda: NVIDIA or AMD, xpu: Intel, mps: Apple."),
]
TaskName = Annotated[
    Task | None,
    Option(
        "What images are made from; default: decided by the files. Without files, images that ship with vivace are "
        "used."
    ),
]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED, strict=True), Option("First seed.")]
NumSeeds = Annotated[
    int | None,
    Field(ge=1, le=10_000, strict=True),
    Option("Seeds per prompt; default: 1, or 3 with --prompt-set.", "--seeds"),
]
Side = Annotated[
    int | None,
    Field(ge=1, le=MAX_SIDE, strict=True),
    Option("Pixels; default: the model's own.", metavar="INTEGER"),
]
Steps = Annotated[
    int | None,
    Field(ge=1, le=1000, strict=True),
    Option("Denoising steps; default: the model's own.", "--num-inference-steps --steps", metavar="INTEGER"),
]
Guidance = Annotated[
    float | None,
    Field(ge=0, le=100, strict=True),
    Option("Guidance scale; default: the model's own.", metavar="FLOAT"),
]
Batch = Annotated[int, Field(ge=1, le=4096, strict=True), Option("Images per call.")]
Threads = Annotated[
    int | None,
    Field(ge=1, le=1024, strict=True),
    Option("CPU threads; the last bits of an image depend on them."),
]
Timeout = Annotated[
    float, Field(gt=0, le=1_000_000, strict=True), Option("Time limit of a round, in seconds.", "--timeout")
]
PricePerHour = Annotated[
    float | None,
    Field(gt=0, le=1_000_000, strict=True),
    Option(
        "Price of an hour of this machine, in any currency: adds the cost of 1,000 images.", metavar="PRICE"
    ),
]
Store = Annotated[Path, Option("Folder of records.")]
NumGpus = Annotated[
    int | Literal["all"] | None,
    read_by(lambda text: one_of_many(text, 1, 1024, "all")),
    Option(
        "Spread the recipes over this many GPUs of this host; each measures its own baseline and has its own table.",
        metavar="N|all",
    ),
]
Ray = Annotated[
    str | None,
    Option(
        "Spread the recipes over a Ray cluster: HOST:PORT, auto for the one of this host, local to start one here.",
        metavar="ADDRESS",
    ),
]
Scorer = Annotated[
    str | None,
    read_by(lambda name: None if name == "none" else name),
    Option(
        "CLIP model that judges quality: embedded, a folder, org/name on the hub, your own module:function, or none; "
        "auto: embedded for embedded models; else openai/clip-vit-large-patch14 if it is on this machine.",
        metavar="NAME",
    ),
]
Witness = Annotated[
    str | None,
    Option(
        "Second model that judges quality: a BLIP for image-text matching, a folder or org/name on the hub.",
        metavar="NAME",
    ),
]
Key = Annotated[
    str | None,
    Option("File with the key that requests carry (Authorization: Bearer).", metavar="FILE", read=read_key),
]
FILE = {"dir_okay": False}
FOLDER = {"file_okay": False, "exists": True}


class CallSettings(Settings):
    """Size, steps and guidance of an image; None for the model's own."""

    height: Side = None
    width: Side = None
    num_inference_steps: Steps = None
    guidance_scale: Guidance = None


class SourceSettings(Settings):
    """The images that images are made from: one for all prompts, or one for each."""

    images: Annotated[
        Texts,
        Option(
            "Source image: for image-to-image, for inpainting (with --mask), or for models that edit. Repeat to give "
            "each prompt its own.",
            "--image",
            metavar="FILE",
        ),
    ] = ()
    masks: Annotated[
        Texts,
        Option(
            "Mask for --image, of the same size: white is repainted, black stays. Repeat to give each prompt its own.",
            "--mask",
            metavar="FILE",
        ),
    ] = ()
    controls: Annotated[
        Texts,
        Option(
            "Image that the ControlNet follows, of the kind it was trained on: edges, depth, ... Repeat to give each "
            "prompt its own.",
            "--control",
            metavar="FILE",
        ),
    ] = ()
    strength: Annotated[
        float | None,
        Field(gt=0, le=1),
        Option(
            "How much --image may change, from 0 (not at all) to 1 (completely): the share of the steps that are run. "
            "Default: 0.8, inpainting 0.9.",
            metavar="FLOAT",
        ),
    ] = None
    controlnet: Annotated[
        str | None,
        Option(
            "Folder of a ControlNet in diffusers' format; default: random weights, to measure time and memory only.",
            metavar="NAME",
        ),
    ] = None
