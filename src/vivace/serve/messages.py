"""What the server and a worker say to each other: JSON lines on pipes. Pixels are in files in memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Load:
    """Load a model, and draw at each size.

    Attributes:
        sizes: (width, height); empty for the model's own.
        loras: files that requests may name: room is reserved for them in the model.
        folder: where images are put, in memory.
    """

    model: str
    recipe: str
    device: str
    threads: int | None
    sizes: tuple[tuple[int, int], ...]
    loras: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Draw:
    """Draw an image.

    Attributes:
        id: of the job.
        call: arguments of the pipeline's call.
        lora: the file and scale of a LoRA; None for none.
        partials: steps after which a partial image is wanted.
    """

    id: str
    prompt: str
    seed: int
    call: dict[str, Any]
    lora: tuple[str, float] | None = None
    partials: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cancel:
    """End a job at its next step."""

    id: str


Message = Load | Draw | Cancel
_KINDS: dict[str, type[Message]] = {"load": Load, "draw": Draw, "cancel": Cancel}


def written(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps({"kind": type(message).__name__.lower(), **asdict(message)}).encode() + b"\n"


def parsed(line: str) -> Message:
    """Return the message of a line."""
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    if fields.get("lora") is not None and kind is Draw:
        fields["lora"] = tuple(fields["lora"])
    return kind(**fields)


def image_file(folder: Path, job: str, name: str) -> Path:
    """Return the file in memory that the pixels of an image are put in."""
    return folder / f"{job}-{name}"
