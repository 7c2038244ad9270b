"""Jobs: images that were accepted, each in one state until it has ended; and the line in which they wait: each owner in
turn, and of each the short jobs first, without starving the long ones."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task

EXCHANGE_S = 0.2
"""Approximate seconds of an exchange of LoRAs, so that requests of one LoRA follow each other."""
_LEAST_AGE_S = 5.0
_NEWEST = 0.1
"""The weight of the last image in the measured pace."""
_PACES = (0.1, 10.0)
"""Bounds of what one image may contribute to the pace: the first of an unusual size takes much longer."""
_AGE = 4.0
"""A job that has waited this many times its own seconds, and at least `_LEAST_AGE_S`, is next whatever its length."""
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
    name: str
    path: Path
    scale: float


@dataclass(frozen=True)
class JobPicture:
    """An image that a job starts from: the call's argument, PIL's mode ("L" for a mask), and its pixels by rows."""

    argument: str
    mode: str
    width: int
    height: int
    pixels: bytes


@dataclass(frozen=True)
class Drawn:
    """A finished image: RGB bytes by rows, seconds by phase, and notes on what was cut off or assumed."""

    pixels: bytes
    width: int
    height: int
    seed: int
    phases: dict[str, float]
    notes: tuple[str, ...] = ()


class JobError(Exception):
    """A request that ends without an image: HTTP's status and headers, the wrong field, OpenAI's name of the error."""

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
        steps: that are run, of those in the pipeline's `call`.
        deadline: of `time.monotonic`.
        partials: steps after which a partial image is sent, by `on_partial`.
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


class QueueFull(JobError):
    """There is no room, and probably some after so many seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(429, message, headers={"Retry-After": str(max(1, retry_after_s))})
        self.retry_after_s = retry_after_s


@dataclass
class JobQueue:
    """Jobs that wait for a worker, up to a number and predicted seconds of them. Each owner of a key may have the same
    share of the places. `pace` is the recent ratio of the actual to the predicted seconds of images."""

    max_jobs: int
    max_seconds: float
    num_workers: Callable[[], int] = lambda: 1
    num_owners: Callable[[], int] = lambda: 1
    pace: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _jobs: list[ImageJob] = field(default_factory=list)
    _taken: dict[str, tuple[ImageJob, float | None]] = field(default_factory=dict)
    """Jobs that workers have, with the time when drawing began; None for a job that waits at its worker."""
    _given_s: dict[str, float] = field(default_factory=dict)
    """Predicted seconds of the jobs that each owner got, as far as it counts for whose turn it is."""
    _promised: list[float] = field(default_factory=list)
    """The times at which clients that were refused were told to come again."""
    _takers: list[Callable[[], bool]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __len__(self) -> int:
        return len(self._jobs)

    def seconds(self) -> float:
        """Return the predicted seconds until a new job would begin."""
        now = self.clock()
        running = sum(
            max(0.0, self.pace * job.predicted_s - (0.0 if since is None else now - since))
            for job, since in self._taken.values()
        )
        waiting = self.pace * sum(job.predicted_s for job in self._jobs)
        return (waiting + running) / max(1, self.num_workers())

    def note_drawn(self, predicted_s: float, seconds: float) -> None:
        """Update the pace with the seconds of an image."""
        low, high = _PACES
        measured = min(max(seconds / max(predicted_s, 1e-3), low), high)
        self.pace *= (measured / self.pace) ** _NEWEST

    def check_room(self, number: int, owner: str = "") -> None:
        """Raise QueueFull if there is no room for more jobs of an owner."""
        waiting = [*self._jobs, *(job for job, since in self._taken.values() if since is None)]
        own = sum(job.owner == owner for job in waiting)
        share = max(1, self.max_jobs // max(1, self.num_owners()))
        message = ""
        if waiting and len(waiting) + number > self.max_jobs:
            message = f"{len(waiting)} images wait, and no more than {self.max_jobs} may"
        elif own and own + number > share:
            message = f"{own} images of this key wait, and no more than {share} may"
        if message:
            usual = max(0.1, self.pace * sum(job.predicted_s for job in waiting) / len(waiting))
            images_s = number * usual / max(1, self.num_workers())
            raise QueueFull(message, self._promise(images_s, images_s))
        seconds = self.seconds()
        if seconds > self.max_seconds:
            raise QueueFull(
                f"images that wait take about {seconds:.0f} s, and no more than {self.max_seconds:.0f} may",
                self._promise(seconds - self.max_seconds, seconds / max(1, len(self._jobs))),
            )

    def _promise(self, room_s: float, each_s: float) -> int:
        """Return in how many seconds a client that is refused may come again: after those that were refused before it,
        whose images take `each_s`, and not before there is room."""
        now = self.clock()
        self._promised = [time_ for time_ in self._promised if time_ > now][-self.max_jobs :]
        self._promised.append(max(now + room_s, max(self._promised, default=0.0) + each_s))
        return math.ceil(self._promised[-1] - now)

    async def put(self, job: ImageJob, *, first: bool = False) -> None:
        """Add a job; `first` before all others, which is for one whose worker died."""
        async with self._changed:
            if all(
                other.owner != job.owner for other in self._jobs
            ):  # nobody saves turns while having no jobs
                least = min((self._given_s.get(other.owner, 0.0) for other in self._jobs), default=0.0)
                self._given_s[job.owner] = max(
                    least, self._given_s.get(job.owner, 0.0) if self._jobs else 0.0
                )
            self._jobs.insert(0, job) if first else self._jobs.append(job)
            # All of them: a worker that is woken may have died meanwhile, and the others would wait on.
            self._changed.notify_all()

    async def take(
        self,
        lora: str | None,
        is_idle: Callable[[], bool] = lambda: True,
        batches: Callable[[ImageJob], tuple[int, ...]] = lambda job: (),
    ) -> list[ImageJob]:
        """Wait for the next job of a worker that has a LoRA loaded, or for several that one call draws.

        Args:
            is_idle: whether the worker would begin at once; one that still draws lets idle ones go first.
            batches: numbers of images that are drawn at once with a job.
        """
        async with self._changed:
            self._takers.append(is_idle)
            try:
                while not self._jobs or (not is_idle() and self._is_for_idle()):
                    await self._changed.wait()
            finally:
                self._takers.remove(is_idle)
                self._changed.notify_all()
            jobs = self._batch(self._next(lora), batches)
            for job in jobs:
                self._jobs.remove(job)
                self._taken[job.id] = job, None
                self._given_s[job.owner] = self._given_s.get(job.owner, 0.0) + job.predicted_s
            return jobs

    def _is_for_idle(self) -> bool:
        """Return whether the next job is not for workers that still draw: an idle one would begin it at once, or a
        worker died of it, and whose the next death is must be certain."""
        return any(is_idle() for is_idle in self._takers) or any(job.attempts for job in self._jobs)

    async def look_again(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def begin(self, job: ImageJob) -> None:
        """Note that a worker draws a job now."""
        if job.id in self._taken:
            self._taken[job.id] = job, self.clock()

    def _batch(self, first: ImageJob, batches: Callable[[ImageJob], tuple[int, ...]]) -> list[ImageJob]:
        others = [job for job in self._jobs if job is not first and job.goes_with(first)]
        most = max((number for number in batches(first) if number <= 1 + len(others)), default=1)
        return [first, *sorted(others, key=lambda job: job.accepted_at)[: most - 1]]

    def _next(self, lora: str | None) -> ImageJob:
        now = self.clock()
        retried = [job for job in self._jobs if job.attempts]
        if retried:
            return retried[0]
        owner = min((job.owner for job in self._jobs), key=lambda each: self._given_s.get(each, 0.0))
        jobs = [job for job in self._jobs if job.owner == owner]
        aged = [job for job in jobs if now - job.accepted_at > max(_LEAST_AGE_S, _AGE * job.predicted_s)]
        if aged:
            return min(aged, key=lambda job: job.accepted_at)
        return min(
            jobs, key=lambda job: (job.predicted_s + EXCHANGE_S * (_name(job) != lora), job.accepted_at)
        )

    def leave(self, job: ImageJob) -> None:
        """Take a job out of the line, or note that it no longer runs."""
        if job in self._jobs:
            self._jobs.remove(job)
        self._taken.pop(job.id, None)


def _name(job: ImageJob) -> str | None:
    return None if job.lora is None else job.lora.name
