"""All replicas and their waiting line, for the routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from vivace.serve.queue.image_folder import ImageFolder
from vivace.serve.queue.job_queue import JobQueue, QueueFull
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, Ledger, State
from vivace.serve.queue.messages import Load
from vivace.serve.queue.process import Workers
from vivace.serve.queue.replica import Phase, Replica
from vivace.serve.queue.startup import key_of
from vivace.serve.settings import ModelState, ServeSettings

Observe = Callable[[ImageJob, dict[str, Any]], None]


class JobPool:
    """Jobs from their acceptance to their end, whoever draws them.

    Attributes:
        state: of the model; None until a worker has loaded it.
        problem: why no worker will ever draw; None if one may.
        is_ready: whether requests are accepted, and nothing says that they will not be drawn.
    """

    state: ModelState | None
    problem: str | None
    is_ready: bool

    def __init__(self, settings: ServeSettings, num_workers: int) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.line = JobQueue(settings.max_queue, settings.max_wait_s, num_workers, settings.num_owners)

    def check_room(self, number: int, owner: str) -> None:
        """Count so many jobs of an owner as rejected if they must not wait.

        Raises:
            QueueFull: there is no room for them.
        """
        try:
            self.line.check_room(number, owner)
        except QueueFull:
            self.ledger.rejected += number
            raise

    async def submit(self, jobs: list[ImageJob]) -> None:
        """Let jobs wait, all or none.

        Raises:
            QueueFull: there is no room for them.
        """
        self.check_room(len(jobs), jobs[0].owner)
        for job in jobs:
            self.ledger.accept(job)
        for job in jobs:
            await self.line.put(job)

    async def wait(self, job: ImageJob) -> Drawn:
        """Wait for a job until its deadline.

        Raises:
            JobError: it ended without an image.
        """
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
        if not job.has_ended:
            self.ledger.fail(job, error or JobError(499, "the request was cancelled"), state)
            self._withdraw(job)

    def _withdraw(self, job: ImageJob) -> None:
        raise NotImplementedError


class ReplicaPool(JobPool):
    """Workers, and jobs for them.

    Args:
        observe: called with each finished job and the event of its worker.
        workers: makes the process of a replica, and ends with the pool.
    """

    def __init__(self, settings: ServeSettings, observe: Observe, workers: Workers) -> None:
        super().__init__(settings, max(1, len(settings.gpus)))
        self._workers = workers
        self._folder = ImageFolder()
        load = Load(
            settings.model,
            settings.recipe,
            settings.device,
            settings.threads,
            tuple((size.width, size.height) for size in settings.sizes),
            tuple(map(str, settings.loras.values())),
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
                lambda gpu=gpu: workers.make(gpu),  # type: ignore[misc]
                observe,
                key,
                settings.idle_unload_s,
            )
            for number, gpu in enumerate(settings.gpus or (None,), 1)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels: set[asyncio.Task[None]] = set()
        """Kept from being collected before they end."""

    def start(self) -> None:
        """Start all workers."""
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
    def state(self) -> ModelState | None:  # type: ignore[override]
        return next((replica.state for replica in self.replicas if replica.state is not None), None)

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return any(replica.accepts for replica in self.replicas)

    @property
    def problem(self) -> str | None:  # type: ignore[override]
        if all(replica.phase is Phase.UNUSABLE for replica in self.replicas):
            return self.replicas[0].problem
        return None

    def _withdraw(self, job: ImageJob) -> None:
        for replica in self.replicas:
            if replica.has(job):
                task = asyncio.create_task(replica.cancel(job))
                self._cancels.add(task)
                task.add_done_callback(self._cancels.discard)
                return
        self.line.leave(job)
