"""The pool of the routes when replicas are Ray Serve's: with the same waiting line and counts as on one machine.

Images wait here, in the order of `waiting`, and as many are sent as there are replicas. If a replica is lost with its
node, its image is drawn again by another from the same seed, and the client gets one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Protocol

from vivace.serve.queue.jobs import ImageJob, JobError, State
from vivace.serve.queue.pool import JobPool, Observe
from vivace.serve.queue.ray_drawer import DrawerEvent, Order
from vivace.serve.queue.replica import Phase
from vivace.serve.settings import ModelState, ServeSettings

LOG = logging.getLogger("vivace.serve")
_MOST_ATTEMPTS = 3
"""Replicas that may be lost while they draw a job."""
_POLL_S = 0.5
_PAUSE_S = 0.2


class Stream(Protocol):
    """Events of an order."""

    def __aiter__(self) -> AsyncIterator[DrawerEvent]: ...

    def cancel(self) -> None: ...


class Drawers(Protocol):
    """The deployment, as the pool sees it."""

    def draw(self, order: Order) -> Stream: ...

    def state(self) -> Awaitable[tuple[ModelState | None, str | None]]: ...

    async def num_running(self) -> int: ...


@dataclass
class RemoteReplica:
    """The state of a replica, for health and metrics."""

    number: int
    phase: Phase = Phase.READY
    doing: str = "placed by Ray"
    memory: dict[str, int] = field(default_factory=dict)
    num_restarts: int = 0
    num_exchanges: int = 0
    energy_j: float | None = None
    is_able: bool = True
    starting: None = None


class RayPool(JobPool):
    """Replicas of Ray Serve, and jobs for them.

    Args:
        observe: called with each finished job and the event of its worker.
        drawers: the deployment.
        ahead: images that are sent for each replica; more than one lets Ray see that images wait, and start more.
        lost: exceptions that mean that a replica was lost.
    """

    def __init__(
        self,
        settings: ServeSettings,
        observe: Observe,
        drawers: Drawers,
        ahead: int = 1,
        lost: tuple[type[BaseException], ...] = (),
    ) -> None:
        super().__init__(settings, 1)
        self.state = None
        self.problem = None
        self._drawers, self._observe, self._ahead, self._lost = drawers, observe, ahead, lost
        self._remote: dict[str, RemoteReplica] = {}
        self._num_running = 0
        self._streams: dict[str, Stream] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def replicas(self) -> list[RemoteReplica]:
        return list(self._remote.values())

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self.state is not None and self._num_running > 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(each) for each in (self._load(), self._count(), self._send())]

    async def stop(self) -> None:
        for task in (*self._tasks, *self._flying):
            task.cancel()
        for task in (*self._tasks, *self._flying):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _withdraw(self, job: ImageJob) -> None:
        self.line.leave(job)
        if (stream := self._streams.get(job.id)) is not None:
            stream.cancel()

    async def _load(self) -> None:
        while self.state is None and self.problem is None:
            try:
                self.state, self.problem = await self._drawers.state()
            except self._lost as error:
                LOG.warning("a replica was lost while it loaded the model: %s", error)
                await asyncio.sleep(_PAUSE_S)

    async def _count(self) -> None:
        while True:
            try:
                running = await self._drawers.num_running()
            except self._lost as error:  # the controller is itself started again by Ray
                LOG.warning("Ray does not say how many replicas run: %s", error)
                await asyncio.sleep(_POLL_S)
                continue
            if running != self._num_running:
                LOG.info("%d replicas run", running)
                self._num_running = running
                self.line.num_workers = max(1, running)
                self._changed.set()
            await asyncio.sleep(_POLL_S)

    async def _send(self) -> None:
        """Send as many jobs as there are replicas, each as soon as one is free."""
        while True:
            while len(self._flying) >= self._ahead * max(1, self._num_running):
                self._changed.clear()
                await self._changed.wait()
            (job,) = await self.line.take(None)
            if job.has_ended:
                self.line.leave(job)
                continue
            task = asyncio.create_task(self._draw(job))
            self._flying.add(task)
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._changed.set()

    async def _draw(self, job: ImageJob) -> None:
        self.ledger.move(job, State.RUNNING)
        self.line.begin(job)
        job.began_at = time.monotonic()
        why = "its events ended"
        try:
            stream = self._streams[job.id] = self._drawers.draw(Order.of(job))
            async for event in stream:
                self._note(job, event)
        except self._lost as error:
            why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        finally:
            self._streams.pop(job.id, None)
            self.line.leave(job)
        if not job.has_ended:
            await self._again(job, why)

    async def _again(self, job: ImageJob, why: str) -> None:
        job.attempts += 1
        LOG.warning("%s: its replica was lost (%s); attempt %d", job.id, why, job.attempts)
        if job.attempts >= _MOST_ATTEMPTS:
            self.ledger.fail(
                job, JobError(503, f"{job.attempts} replicas were lost while they drew this image")
            )
            return
        await asyncio.sleep(_PAUSE_S)
        self.ledger.move(job, State.WAITING)
        if not job.has_ended:
            await self.line.put(job, first=True)

    def _note(self, job: ImageJob, event: DrawerEvent) -> None:
        if event.step is not None and event.drawn is not None:
            if job.on_partial is not None and not job.has_ended:
                job.on_partial(event.step, event.drawn)
            return
        replica = self._remote.setdefault(event.drawer, RemoteReplica(len(self._remote) + 1))
        replica.num_restarts, replica.num_exchanges = event.restarts, event.exchanges
        if event.drawn is not None:
            self._observe(job, event.ended)
            if "energy_j" in event.ended:
                replica.energy_j = (replica.energy_j or 0.0) + event.ended["energy_j"]
            replica.memory = {
                key: event.ended[key] for key in ("rss_bytes", "gpu_bytes") if key in event.ended
            }
            self.ledger.finish(job, event.drawn)
        elif event.error is not None and not job.has_ended:
            self.ledger.fail(job, JobError(*event.error))
