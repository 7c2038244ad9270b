"""All replicas and their waiting line, for the routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from vivace.serve.queue.deadlines import drawn_in_time
from vivace.serve.queue.image_folder import ImageFolder
from vivace.serve.queue.job_queue import JobQueue, accept, check_room
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, Ledger, State
from vivace.serve.queue.messages import Load
from vivace.serve.queue.process import COMMAND, WITH_GPU, WorkerProcess
from vivace.serve.queue.replica import Phase, Replica
from vivace.serve.queue.startup import PastStarts
from vivace.serve.settings import ModelState, ServeSettings

Observe = Callable[[ImageJob, dict[str, Any]], None]


class ReplicaPool:
    """Workers, and jobs for them.

    Args:
        observe: called with each finished job and the event of its worker.
        make_process: makes the process of a replica on a GPU, or on none.
    """

    def __init__(
        self,
        settings: ServeSettings,
        observe: Observe = lambda job, event: None,
        make_process: Callable[[str | None], WorkerProcess] | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.line = JobQueue(
            settings.max_queue, settings.max_wait_s, max(1, len(settings.gpus)), settings.num_owners
        )
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
        make = make_process or process_maker(settings)
        past = PastStarts.of(settings)
        self.replicas = [
            Replica(
                number,
                load,
                self.line,
                self.ledger,
                lambda gpu=gpu: make(gpu),  # type: ignore[misc]
                observe,
                past,
                settings.idle_unload_s,
            )
            for number, gpu in enumerate(settings.gpus or (None,), 1)
        ]
        self._tasks: list[asyncio.Task[None]] = []

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
        self._folder.cleanup()

    @property
    def state(self) -> ModelState | None:
        """The state of the model; None until a worker has loaded it."""
        return next((replica.state for replica in self.replicas if replica.state is not None), None)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted, and nothing says that they will not be drawn."""
        return any(replica.accepts for replica in self.replicas)

    @property
    def problem(self) -> str | None:
        """The reason why no worker will ever draw; None if one may."""
        if all(replica.phase is Phase.UNUSABLE for replica in self.replicas):
            return self.replicas[0].problem
        return None

    def check_room(self, number: int, owner: str) -> None:
        """Raise QueueFull if there is no room for so many jobs of an owner."""
        check_room(number, owner, self.line, self.ledger)

    async def submit(self, jobs: list[ImageJob]) -> None:
        """Accept jobs.

        Raises:
            QueueFull: there is no room for them.
        """
        await accept(jobs, self.line, self.ledger)

    async def wait(self, job: ImageJob) -> Drawn:
        """Wait for a job until its deadline.

        Raises:
            JobError: it ended without an image.
        """
        return await drawn_in_time(job, self.cancel)

    def cancel(self, job: ImageJob, error: JobError | None = None, state: State = State.CANCELLED) -> None:
        """End a job: at once if it waits, at its next step if it is drawn."""
        if job.has_ended:
            return
        self.ledger.fail(job, error or JobError(499, "the request was cancelled"), state)
        for replica in self.replicas:
            if replica.has(job):
                _keep(asyncio.create_task(replica.cancel(job)))
                return
        self.line.leave(job)


_TASKS: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    """Keep a task from being collected before it ends."""
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def process_maker(settings: ServeSettings) -> Callable[[str | None], WorkerProcess]:
    """Return a maker of worker processes on a GPU, by its UUID or index, or on the default device."""
    command = COMMAND if settings.device == "cpu" else (*COMMAND, WITH_GPU)

    def make(gpu: str | None) -> WorkerProcess:
        return WorkerProcess(command, {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})

    return make


class EarlyProcesses:
    """Workers that start before their pool, so that they import libraries at the same time as this process.

    Args:
        make: makes the process of a worker.
    """

    def __init__(
        self, settings: ServeSettings, make: Callable[[str | None], WorkerProcess] | None = None
    ) -> None:
        self._make = make or process_maker(settings)
        self._waiting = {gpu: self._make(gpu) for gpu in settings.gpus or (None,)}

    async def start(self) -> None:
        for process in self._waiting.values():
            await process.start()

    def take(self, gpu: str | None) -> WorkerProcess:
        """Return the early process of a GPU the first time, and a new one after that."""
        return self._waiting.pop(gpu, None) or self._make(gpu)

    async def stop(self) -> None:
        """End the processes that were not taken."""
        for process in self._waiting.values():
            await process.stop(at_once=True)
        self._waiting.clear()
