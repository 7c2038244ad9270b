"""Messages between the server and a worker: JSON lines on pipes. Pixels are in files in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from vivace.foundation.spec.workload import Task


@dataclass(frozen=True)
class Load:
    """Load a model, and draw at each size.

    Attributes:
        sizes: (width, height); empty for the model's own.
        loras: files that requests may name; slots are reserved for them in the model.
        folder: where images are put, in memory.
        task: the only one to serve; None for all tasks of the weights.
        batches: numbers of images at once that are timed.
        is_restart: whether the server has drawn before, and goes on without LoRAs that have gone since.
    """

    model: str
    recipe: str
    device: str
    threads: int | None
    sizes: tuple[tuple[int, int], ...]
    loras: tuple[str, ...]
    folder: str
    task: Task | None = None
    batches: tuple[int, ...] = ()
    is_restart: bool = False
    kind: Literal["load"] = "load"


@dataclass(frozen=True)
class SentPicture:
    """A source image in a message.

    Attributes:
        argument: of the pipeline's call.
        mode: of PIL: "RGB", or "L" for a mask.
        file: has its pixels, row by row.
    """

    argument: str
    mode: str
    width: int
    height: int
    file: str


@dataclass(frozen=True)
class Draw:
    """Draw an image, or several at once.

    Attributes:
        ids: of the jobs.
        prompts, seeds: of each.
        call: arguments of the pipeline's call.
        lora: the file and scale of a LoRA; None for none.
        partials: steps after which partial images are sent.
        task: what is drawn from.
        pictures: that a single image is drawn from.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    call: dict[str, Any]
    lora: tuple[str, float] | None = None
    partials: tuple[int, ...] = ()
    task: Task = "text"
    pictures: tuple[SentPicture, ...] = ()
    kind: Literal["draw"] = "draw"

    @property
    def id(self) -> str:
        """The name of the message in events: its first job."""
        return self.ids[0]


@dataclass(frozen=True)
class Cancel:
    """End a job at its next step."""

    id: str
    kind: Literal["cancel"] = "cancel"


Message = Load | Draw | Cancel
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def written(message: Message) -> bytes:
    """Return the line of a message."""
    return _MESSAGE.dump_json(message) + b"\n"


def parsed(line: str) -> Message:
    """Return the message of a line."""
    return _MESSAGE.validate_json(line)


def image_file(folder: Path, job: str, name: str) -> Path:
    """Return the file in memory for the pixels of an image."""
    return folder / f"{job}-{name}"
