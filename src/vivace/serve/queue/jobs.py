"""Jobs: images that were accepted, each in one state until it has ended."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task

_NUMBERS = itertools.count(1)


class State(StrEnum):
    """Where a job is. Those after `RUNNING` are ends."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class RequestedLora:
    """A LoRA of a request: its name, file and factor."""

    name: str
    path: Path
    scale: float


@dataclass(frozen=True)
class JobPicture:
    """An image that a job starts from.

    Attributes:
        argument: of the pipeline's call.
        mode: of PIL: "RGB", or "L" for a mask.
        pixels: row by row.
    """

    argument: str
    mode: str
    width: int
    height: int
    pixels: bytes


@dataclass(frozen=True)
class Drawn:
    """A finished image.

    Attributes:
        pixels: RGB bytes, row by row.
        phases: seconds by phase.
        notes: what was cut off or assumed.
    """

    pixels: bytes
    width: int
    height: int
    seed: int
    phases: dict[str, float]
    notes: tuple[str, ...] = ()


class JobError(Exception):
    """A request that ends without an image.

    Attributes:
        status: the HTTP status of the answer, with its `headers`.
        field, code: of the request that are wrong, and OpenAI's name of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field_: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code, self.headers = status, field_, code, headers


@dataclass(eq=False)
class ImageJob:
    """An image to draw.

    Attributes:
        call: arguments of the pipeline's call.
        steps: that are run.
        task, pictures: what it is drawn from.
        predicted_s: predicted seconds of drawing.
        deadline: of `time.monotonic`.
        partials: steps after which a partial image is sent.
        on_partial: called with each of them.
        owner: of the key that asked for it; empty without keys.
        attempts: number of workers that died while drawing it.
        is_alone: whether it is drawn by itself, since a batch with it failed.
    """

    prompt: str
    seed: int
    size: Size
    steps: int
    call: dict[str, Any]
    predicted_s: float
    deadline: float
    lora: RequestedLora | None = None
    owner: str = ""
    task: Task = "text"
    pictures: tuple[JobPicture, ...] = ()
    partials: tuple[int, ...] = ()
    on_partial: Callable[[int, Drawn], None] | None = None
    on_step: Callable[[int], None] | None = None
    id: str = field(default_factory=lambda: f"img-{next(_NUMBERS)}")
    accepted_at: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    attempts: int = 0
    is_alone: bool = False
    state: State = State.WAITING
    result: asyncio.Future[Drawn] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def has_ended(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    def goes_with(self, other: ImageJob) -> bool:
        """Return whether one call draws both."""
        return (
            not (self.is_alone or other.is_alone or self.pictures or other.pictures)
            and self.call == other.call
            and self.lora == other.lora
            and self.partials == other.partials
        )


@dataclass
class Ledger:
    """Counts jobs by state, so that accepted = waiting + running + done + failed + cancelled at every moment."""

    accepted: int = 0
    rejected: int = 0
    states: Counter[State] = field(default_factory=Counter)

    def accept(self, job: ImageJob) -> None:
        self.accepted += 1
        self.states[job.state] += 1

    def move(self, job: ImageJob, state: State) -> None:
        """Move a job to another state; a job that has ended stays where it is."""
        if job.has_ended:
            return
        self.states[job.state] -= 1
        self.states[state] += 1
        job.state = state

    def finish(self, job: ImageJob, drawn: Drawn) -> None:
        if not job.has_ended:
            self.move(job, State.DONE)
            if not job.result.done():
                job.result.set_result(drawn)

    def fail(self, job: ImageJob, error: JobError, state: State = State.FAILED) -> None:
        if not job.has_ended:
            self.move(job, state)
            if not job.result.done():
                job.result.set_exception(error)
                job.result.exception()  # read once, so that nobody needs to
