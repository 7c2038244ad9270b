"""All replicas and their waiting line, for the routes; on one machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, JobQueue, Ledger, QueueFull, State
from vivace.serve.queue.messages import ImageFolder, Load
from vivace.serve.queue.replica import Phase, Replica, Worker
from vivace.serve.queue.startup import key_of
from vivace.serve.settings import ModelState, ServeSettings

Observe = Callable[[ImageJob, dict[str, Any]], None]


class WorkerSource(Protocol):
    """Makes the workers of replicas.

    Attributes:
        places: of the replicas: GPUs of this machine, or names on a cluster; None for the default device.
        num_steady: how many of them, the first ones, draw all the time; the others only while many images wait.
    """

    places: tuple[str | None, ...]
    num_steady: int

    def make(self, place: str | None) -> Worker: ...

    async def stop(self) -> None:
        """End what the workers were made by."""
        ...


class ReplicaPool:
    """Jobs from their acceptance to their end, and the replicas that draw them; `observe` is called with each finished
    job."""

    def __init__(self, settings: ServeSettings, observe: Observe, workers: WorkerSource) -> None:
        self.ledger = Ledger()
        self.line = JobQueue(settings.max_queue, settings.max_wait_s, self._num_able, settings.num_owners)
        self._workers = workers
        self._folder = ImageFolder()
        load = Load(
            settings.model,
            settings.recipe,
            settings.device,
            settings.threads,
            tuple((size.width, size.height) for size in settings.sizes),
            tuple(map(str, settings.lora_files().values())),
            str(self._folder.path),
            settings.task,
            settings.batches,
        )
        key = key_of(settings)
        self.replicas = [
            Replica(
                number,
                load,
                self.line,
                self.ledger,
                lambda place=place: workers.make(place),  # type: ignore[misc]
                observe,
                key,
                settings.idle_unload_s,
                is_spare=number > workers.num_steady,
            )
            for number, place in enumerate(workers.places, 1)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels: set[asyncio.Task[None]] = set()
        """Kept from being collected before they end."""

    def start(self) -> None:
        self._tasks = [asyncio.create_task(replica.run()) for replica in self.replicas]

    async def stop(self) -> None:
        """Stop all workers at once; waiting requests get an error."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._workers.stop()
        self._folder.cleanup()

    @property
    def state(self) -> ModelState | None:
        """What is known of the model; None until a worker has loaded it."""
        return next((replica.state for replica in self.replicas if replica.state is not None), None)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted, and nothing says that they will not be drawn."""
        return self.state is not None and any(replica.accepts for replica in self.replicas)

    @property
    def problem(self) -> str | None:
        """Why no worker will ever draw; None if one may."""
        steady = [replica for replica in self.replicas if not replica.is_spare]
        return steady[0].problem if all(each.phase is Phase.UNUSABLE for each in steady) else None

    def _num_able(self) -> int:
        return sum(replica.phase not in (Phase.UNLOADED, Phase.UNUSABLE) for replica in self.replicas)

    def check_room(self, number: int, owner: str) -> None:
        """Count so many jobs of an owner as rejected, and raise QueueFull, if there is no room for them."""
        try:
            self.line.check_room(number, owner)
        except QueueFull:
            self.ledger.rejected += number
            raise

    async def submit(self, jobs: list[ImageJob]) -> None:
        """Let jobs wait, all or none; QueueFull if there is no room for them."""
        self.check_room(len(jobs), jobs[0].owner)
        for job in jobs:
            self.ledger.accept(job)
        for job in jobs:
            await self.line.put(job)

    async def wait(self, job: ImageJob) -> Drawn:
        """Wait for a job until its deadline; JobError if it ended without an image."""
        try:
            left_s = max(0.0, job.deadline - time.monotonic())
            return await asyncio.wait_for(asyncio.shield(job.result), left_s)
        except TimeoutError:
            where = "while it waited" if job.state is State.WAITING else "while it was drawn"
            error = JobError(504, f"the time of the request ended {where}")
            self.cancel(job, error, State.FAILED)
            raise error from None

    def cancel(self, job: ImageJob, error: JobError | None = None, state: State = State.CANCELLED) -> None:
        """End a job: at once if it waits, at its next step if it is drawn."""
        if job.has_ended:
            return
        self.ledger.fail(job, error or JobError(499, "the request was cancelled"), state)
        for replica in self.replicas:
            if replica.has(job):
                task = asyncio.create_task(replica.cancel(job))
                self._cancels.add(task)
                task.add_done_callback(self._cancels.discard)
                return
        self.line.leave(job)
