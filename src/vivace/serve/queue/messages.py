"""What a server and its workers exchange: messages as JSON lines on pipes, and pixels in files of a folder, in memory
where the system has such a place.

A server that is killed cannot remove its folder, so the next one does. A folder in use is locked by its server: unlike
the number of a process, a lock holds across containers that share the memory, and ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from vivace.foundation.processes.system import is_posix, lock_folder
from vivace.foundation.spec.workload import Task

LOG = logging.getLogger("vivace.serve")
_MEMORY = Path("/dev/shm")
_PREFIX = "vivace-images-"
_NEW = ".vivace-new-"
"""The prefix of a folder without a lock, which nobody may remove."""


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
    """A source image in a message: the argument of the pipeline's call, PIL's mode ("RGB", or "L" for a mask), and the
    file of its pixels, row by row."""

    argument: str
    mode: str
    width: int
    height: int
    file: str


@dataclass(frozen=True)
class Draw:
    """Draw an image, or several at once.

    Attributes:
        ids, prompts, seeds: of each job.
        call: arguments of the pipeline's call.
        lora: the file and scale of a LoRA; None for none.
        partials: steps after which partial images are sent.
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
    return _MESSAGE.dump_json(message) + b"\n"


def parsed(line: str | bytes) -> Message:
    return _MESSAGE.validate_json(line)


def image_file(folder: Path, job: str, name: str) -> Path:
    return folder / f"{job}-{name}"


class ImageFolder:
    """A folder of one server, in `path`: in memory, or among the temporary files where there is no such place."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        remove_abandoned(parent)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        self._lock = lock_folder(new)
        is_locked = self._lock is not None
        self.path = new.rename(parent / f"{_PREFIX}{new.name.removeprefix(_NEW)}") if is_locked else new

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_images(folder: Path, jobs: Iterable[str]) -> None:
    """Remove what is left of jobs that have ended: their worker may have died, or written a part."""
    for job in jobs:
        for file in folder.glob(f"{job}-*"):
            file.unlink(missing_ok=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's servers that have ended without doing so. Only POSIX has the locks."""
    if not is_posix():
        return
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with _lock_for_removal(folder) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(folder, ignore_errors=True)
                LOG.info("%s is removed: its server ended without doing so", folder)


@contextlib.contextmanager
def _lock_for_removal(folder: Path) -> Iterator[bool]:
    """Lock a folder of this user for a while; yield False if another process has it, or it is none."""
    try:
        is_own = not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
        lock = lock_folder(folder) if is_own else None
    except OSError:  # it is locked, or was removed meanwhile
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)
