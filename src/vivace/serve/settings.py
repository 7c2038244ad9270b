"""Settings of a server, which are the options of `vivace serve`, and its facts about the loaded model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, TypeAdapter

from vivace.errors import UsageError
from vivace.foundation.spec.recipe_syntax import BEST
from vivace.foundation.spec.settings import (
    FOLDER,
    DeviceName,
    Option,
    Positional,
    Settings,
    Threads,
    read_by,
)
from vivace.foundation.spec.sizes import Size, in_order
from vivace.foundation.spec.workload import steps_run
from vivace.serve.http.access import Keys, host_name, is_loopback

MAX_IMAGES = 10
"""Images of one request."""
MAX_PROMPT = 8192
"""Characters of a prompt."""
_BATCHES = (2, 4)
_LORA = ".safetensors"


def lora_files(folder: Path) -> dict[str, Path]:
    return {
        name.removesuffix(_LORA): (folder / name).resolve()
        for name in sorted(os.listdir(folder))
        if name.endswith(_LORA) and name != _LORA
    }


def folder_of_loras(folder: Path) -> Path:
    """Return a folder whose LoRAs requests may name; UsageError if there is none in it, or one that no request can
    name."""
    try:
        files = lora_files(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
    if not files:
        raise UsageError(f"{folder}: there is no {_LORA} file in it")
    wrong = next((name for name in files if not name.isprintable()), None)
    if wrong is not None:
        raise UsageError(f"{folder}: no request can name {wrong!r}; rename it to plain text")
    return folder


def least_and_most(text: str) -> tuple[int, int]:
    """Read "N" or "MIN-MAX"."""
    low, separator, high = text.partition("-")
    high = high if separator else low
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
        raise UsageError(f"{text[:50]!r}: give a number, or MIN-MAX, e.g. 2-8")
    if not 1 <= int(low) <= int(high) <= 1_000:
        raise UsageError(f"{text[:50]!r}: give 1 to 1000, the smaller number first")
    return int(low), int(high)


def url_of(text: str, *, has_path: bool = True) -> str:
    """Return a URL without the slash at its end."""
    text = text.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        is_url = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and text.isascii() and parts.port != 0
        )
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or parts.username or (parts.path and not has_path):
        raise UsageError(f"{text[:100]!r}: give a URL such as https://images.example.org")
    return text


def host_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of hosts in lower case."""
    for name in names:
        if host_name(name) != name.lower() or ":" in name:
            raise UsageError(f"{name[:100]!r}: give a name as in a URL, without port and scheme")
    return tuple(name.lower() for name in names)


class ServeSettings(Settings):
    """How to serve. `why` is the source of the recipe, for the page and the log."""

    model: Annotated[str, Positional()]
    recipe: Annotated[
        str, Option("Recipe to apply; default: best, which keeps the image.", metavar="R", default="")
    ] = BEST
    tune_minutes: Annotated[
        float | None,
        Field(gt=0, le=10_000),
        Option("Search for the recipe first, as `vivace tune` does.", "--tune", metavar="MIN"),
    ] = None
    device: DeviceName = "auto"
    gpus: Annotated[
        tuple[str, ...],
        read_by(lambda text: tuple(text.split(","))),
        Option("One replica on each of these GPUs; default: the first.", metavar="all|I,J"),
    ] = ()
    ray_address: Annotated[
        str | None,
        Option(
            "Serve on a Ray cluster: HOST:PORT, or auto for this host's; every node needs the folder of --loras.",
            "--ray",
            metavar="ADDRESS",
        ),
    ] = None
    replicas: Annotated[
        tuple[int, int] | None,
        read_by(least_and_most),
        Option(
            "With --ray; those beyond MIN draw while many images wait. Default: one for each GPU.",
            metavar="N|MIN-MAX",
        ),
    ] = None
    threads: Annotated[Threads, Option("CPU threads of each worker.")] = None
    sizes: Annotated[
        tuple[Size, ...],
        read_by(lambda text: in_order(text.split(","))),
        Option("Sizes to warm up before the server is ready; default: the model's own.", metavar="WxH,..."),
    ] = ()
    task: Annotated[
        Literal["text", "image", "inpaint", "edit"] | None,
        Option("Serve only this task; default: every task of the model's weights."),
    ] = None
    batch: Annotated[
        bool,
        Option(
            "Draw 2 or 4 images at once where that is measured to gain 10 %; images differ in their last bits."
        ),
    ] = False
    any_size: Annotated[bool, Option("Also draw other sizes; the first image of each takes longer.")] = False
    loras: Annotated[
        Path | None,
        Option(
            "Folder of LoRAs; requests name its .safetensors files, without the suffix.",
            metavar="DIR",
            path=FOLDER,
            read=folder_of_loras,
        ),
    ] = None
    max_queue: Annotated[int, Field(ge=1, le=1_000_000), Option("Maximum number of waiting images.")] = 64
    max_wait_s: Annotated[
        float, Field(ge=0, le=86_400), Option("Longest predicted wait, in seconds.", "--max-wait")
    ] = 300.0
    timeout_s: Annotated[
        float, Field(ge=0, le=86_400), Option("Time limit of a request, in seconds.", "--timeout")
    ] = 600.0
    idle_unload_s: Annotated[
        float | None,
        Field(ge=0, le=6_000_000),
        Option(
            "Free the GPU after so many idle minutes.",
            "--idle-unload",
            metavar="MIN",
            read=lambda minutes: 60 * minutes,
        ),
    ] = None
    host: Annotated[str, Option("Address to listen on; any but this machine needs --api-key-file.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=0, le=65_535), Option()] = 8000
    api_keys: Annotated[
        Keys | None,
        Option(
            "A file with the keys that requests must bear, KEY or NAME KEY a line; read again when it changes.",
            "--api-key-file",
            metavar="F",
            read=Keys.read,
        ),
    ] = None
    served_name: Annotated[
        str, Option("The model's name in requests and answers.", "--served-model-name", metavar="NAME")
    ] = ""
    public_url: Annotated[
        str,
        read_by(lambda text: text and url_of(text)),
        Option(
            "This server's URL as clients see it, for the URLs of images; default: that of each request.",
            metavar="URL",
        ),
    ] = ""
    origins: Annotated[
        tuple[str, ...],
        read_by(lambda text: tuple(url_of(each, has_path=False) for each in text.split(",") if each)),
        Option(
            "Sites whose pages may draw here, e.g. https://example.org.",
            "--allowed-origins",
            metavar="URL,...",
        ),
    ] = ()
    hosts: Annotated[
        tuple[str, ...],
        Option(
            "Without a key, also answer requests to this host name; default: localhost and its addresses. Repeatable.",
            "--allow-host",
            metavar="NAME",
            read=host_names,
        ),
    ] = ()
    logs_prompts: Annotated[bool, Option("Write prompts to the log.", "--log-prompts")] = False
    why: str = "as given"

    def check(self) -> None:
        """Raise UsageError for settings that do not go together."""
        if self.api_keys is None and not is_loopback(self.host.lower()):
            raise UsageError(f"--host {self.host} lets other machines in; give --api-key-file FILE, too")
        if self.hosts and self.api_keys is not None:
            raise UsageError("--allow-host is for a server without a key; with one, any name is answered")
        if self.replicas is not None and self.ray_address is None:
            raise UsageError("--replicas is for --ray; on one machine, give --gpus")
        if self.gpus and self.ray_address is not None:
            raise UsageError("--gpus is for one machine; with --ray, give --replicas N or MIN-MAX")
        if self.recipe != BEST and self.tune_minutes is not None:
            raise UsageError("--recipe is the recipe, and --tune searches for one; give one of them")

    @property
    def name(self) -> str:
        return self.served_name or self.model

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of images that may be drawn at once, beside one."""
        return _BATCHES if self.batch else ()

    def lora_files(self) -> dict[str, Path]:
        """Return the names and files of the LoRAs that are there now. Their slots are as large as at the start."""
        try:
            return {} if self.loras is None else lora_files(self.loras)
        except OSError:
            return {}

    def num_owners(self) -> int:
        """Return how many keys there are now, 1 without any."""
        return 1 if self.api_keys is None else len(self.api_keys.names)


SizeKey = Annotated[Size, BeforeValidator(lambda size: Size.of(size) if isinstance(size, str) else size)]
"""A size that JSON has as text."""


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of an image: of each step, and of everything else."""

    step_s: float
    rest_s: float

    def seconds(self, steps: int) -> float:
        return self.rest_s + steps * self.step_s


@dataclass(frozen=True)
class Batching:
    """Drawing several images at once at a size: its gain in images a second by their number, the numbers that gained
    enough, and the largest difference of a pixel (of 255) from the same image drawn alone."""

    gains: dict[int, float]
    allowed: tuple[int, ...]
    difference: int


@dataclass(frozen=True)
class EditState:
    """The model's tasks with images.

    Attributes:
        tasks: the served ones of "image", "inpaint" and "edit"; `refused` says why others are not.
        takes: arguments of the tasks' calls that requests may set.
        strength: of a call that names none; None if these calls have none.
        rounds_up: whether a part of a step counts as one.
    """

    tasks: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    strength: float | None = None
    rounds_up: bool = False
    most_images: int = 1


@dataclass(frozen=True)
class ModelState:
    """What the workers report of the loaded model.

    Attributes:
        steps, guidance, size: of a request that names none.
        multiple: width and height are multiples of this.
        takes: arguments of the pipeline's call that requests may set.
        guided_above: the guidance scale above which a negative prompt has an effect; None if the model has no guidance.
        speeds: of the sizes that were warmed.
        draws_text: whether it draws from a prompt alone.
        unfit_loras: why files of the folder cannot be used, by file.
    """

    name: str
    recipe: str
    device: str
    steps: int
    guidance: float | None
    size: SizeKey
    multiple: int
    takes: frozenset[str]
    guided_above: float | None
    speeds: dict[SizeKey, StepTimes]
    has_partials: bool
    notes: tuple[str, ...] = ()
    draws_text: bool = True
    edits: EditState = EditState()
    batching: dict[SizeKey, Batching] = field(default_factory=dict)
    unfit_loras: dict[str, str] = field(default_factory=dict)

    def steps_run(self, steps: int, strength: float | None) -> int:
        return steps_run(steps, strength, rounds_up=self.edits.rounds_up)

    def batches_of(self, size: Size) -> tuple[int, ...]:
        """Return the numbers of images that are drawn at once at a size, beside one."""
        return self.batching[size].allowed if size in self.batching else ()

    def predicted_s(self, size: Size, steps: int) -> float:
        """Predict the seconds of an image, from the nearest measured size, by its pixels."""
        pixels = size.width * size.height
        nearest = min(self.speeds, key=lambda other: abs(other.width * other.height - pixels))
        return self.speeds[nearest].seconds(steps) * pixels / (nearest.width * nearest.height)


STATE = TypeAdapter(ModelState)
"""Reads what a worker sends."""
