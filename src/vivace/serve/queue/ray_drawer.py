"""A replica of Ray Serve: one worker process, kept alive as on one machine, that draws for a server elsewhere.

Ray places it on a node with a free GPU, starts it again when the node is lost, and starts more when many images wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, JobPicture, RequestedLora
from vivace.serve.queue.pool import ReplicaPool
from vivace.serve.queue.process import COMMAND, Workers
from vivace.serve.settings import ModelState, ServeSettings

_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class Order:
    """An image that a drawer is to draw: an `ImageJob` without what belongs to the server's process.

    Attributes:
        left_s: seconds until its deadline; clocks of two machines differ.
    """

    prompt: str
    seed: int
    size: Size
    steps: int
    call: dict[str, Any]
    lora: RequestedLora | None
    task: Task
    pictures: tuple[JobPicture, ...]
    partials: tuple[int, ...]
    predicted_s: float
    left_s: float

    @classmethod
    def of(cls, job: ImageJob) -> Order:
        names = [field.name for field in dataclasses.fields(cls) if field.name != "left_s"]
        fields: dict[str, Any] = {name: getattr(job, name) for name in names}
        return cls(left_s=job.deadline - time.monotonic(), **fields)

    def job(self) -> ImageJob:
        fields: dict[str, Any] = dict(vars(self))
        return ImageJob(deadline=time.monotonic() + fields.pop("left_s"), **fields)


@dataclasses.dataclass(frozen=True)
class DrawerEvent:
    """An event of an order: a partial image after a step, then the image or the error.

    Attributes:
        ended: the worker's report on the finished image: phases, steps, memory.
        restarts, exchanges: of the worker, since the drawer was started.
    """

    step: int | None = None
    drawn: Drawn | None = None
    error: tuple[int, str] | None = None
    ended: dict[str, Any] = dataclasses.field(default_factory=dict)
    drawer: str = ""
    restarts: int = 0
    exchanges: int = 0


class RayReplica:
    """One worker process behind Ray Serve.

    Args:
        worker: the command line of the worker process.
    """

    def __init__(self, settings: ServeSettings, name: str, worker: tuple[str, ...] = COMMAND) -> None:
        alone = dataclasses.replace(settings, gpus=(), idle_unload_s=None, max_queue=10**6, max_wait_s=1e9)
        self._ended: dict[str, dict[str, Any]] = {}
        self._pool = ReplicaPool(alone, self._observe, Workers(alone, worker))
        self._name = name
        self._started = False

    def _observe(self, job: ImageJob, event: dict[str, Any]) -> None:
        self._ended[job.id] = {name: value for name, value in event.items() if name not in ("file", "id")}

    async def state(self) -> tuple[ModelState | None, str | None]:
        """Wait until the model is loaded; return its state, or the reason why it never will be."""
        self._start()
        while self._pool.state is None and self._pool.problem is None:
            await asyncio.sleep(_LOOK_S)
        return self._pool.state, self._pool.problem

    def _start(self) -> None:
        if not self._started:  # here, since the worker belongs to the event loop of the calls
            self._started = True
            self._pool.start()

    async def draw(self, order: Order) -> AsyncIterator[DrawerEvent]:
        """Draw an image; its caller's leaving ends it within a step."""
        self._start()
        job = order.job()
        events: asyncio.Queue[DrawerEvent | None] = asyncio.Queue()
        job.on_partial = lambda step, drawn: events.put_nowait(DrawerEvent(step=step, drawn=drawn))
        await self._pool.submit([job])
        ending = asyncio.create_task(self._pool.wait(job))
        ending.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield self._end(job, ending)
        finally:
            self._pool.cancel(job)
            self._ended.pop(job.id, None)

    def _end(self, job: ImageJob, ending: asyncio.Task[Drawn]) -> DrawerEvent:
        (replica,) = self._pool.replicas
        counts: dict[str, Any] = {
            "drawer": self._name,
            "restarts": replica.num_restarts,
            "exchanges": replica.num_exchanges,
        }
        try:
            drawn = ending.result()
        except JobError as error:
            return DrawerEvent(error=(error.status, str(error)), **counts)
        return DrawerEvent(drawn=drawn, ended=self._ended.get(job.id, {}), **counts)

    async def close(self) -> None:
        """End the worker."""
        await self._pool.stop()
