"""A replica: a worker process that is kept alive, and draws one job after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vivace.serve.jobs import Drawn, ImageJob, JobError, Ledger, State
from vivace.serve.messages import Cancel, Draw, Load
from vivace.serve.process import WorkerProcess
from vivace.serve.settings import ModelState, Speed
from vivace.serve.waiting import WaitingLine
from vivace.spec.sizes import Size

LOG = logging.getLogger("vivace.serve")
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
_MOST_ATTEMPTS = 2
"""Workers that may die while they draw a job: it is drawn again once."""
_CANCEL_GRACE_S = 30.0
"""Until a worker that does not end a cancelled job is killed."""


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAWING = "drawing"
    WAITING_TO_RESTART = "waiting to restart"
    UNLOADED = "unloaded"
    UNUSABLE = "unusable"


@dataclass(eq=False)
class Replica:
    """One worker and what it does.

    Attributes:
        phase: of the worker; `doing` says more of its start.
        state: of the model, once it is loaded.
        energy_j: joules of the GPU while it drew; None where nothing counts them.
        idle_s: seconds without a job after which the worker ends; None for never.
        on_drawn: called with each finished job and the event of the worker.
    """

    number: int
    load: Load
    line: WaitingLine
    ledger: Ledger
    make_process: Callable[[], WorkerProcess]
    on_drawn: Callable[[ImageJob, dict[str, Any]], None]
    idle_s: float | None = None
    phase: Phase = Phase.STARTING
    doing: str = "starting"
    state: ModelState | None = None
    problem: str = ""
    lora: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    num_restarts: int = 0
    num_exchanges: int = 0
    energy_j: float | None = None
    _process: WorkerProcess | None = None
    _job: ImageJob | None = None

    @property
    def is_able(self) -> bool:
        """Whether it draws, or will when it is asked to."""
        return self.phase in (Phase.READY, Phase.DRAWING, Phase.UNLOADED)

    async def run(self) -> None:
        """Keep a worker alive and let it draw, until this task is cancelled."""
        failures = 0
        try:
            while True:
                loaded = await self._start()
                if self.phase is Phase.UNUSABLE:
                    return
                if loaded:
                    failures = 0
                    if await self._draw_jobs():
                        continue  # it was unloaded, and a job has come
                assert self._process is not None
                end = await self._process.ended()
                await self._process.stop()
                self.num_restarts += 1
                pause = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
                failures += 1
                self.phase, self.doing = Phase.WAITING_TO_RESTART, f"restarting in {pause:g} s: {end}"
                LOG.warning("worker %d ended: %s; it starts again in %g s", self.number, end, pause)
                await asyncio.sleep(pause)
        finally:
            if self._process is not None:
                await self._process.stop(at_once=True)

    async def _start(self) -> bool:
        """Start a worker and load the model; return whether that worked."""
        self.phase, self.doing, self.lora = Phase.STARTING, "starting", None
        self._process = self.make_process()
        await self._process.start()
        await self._process.send(self.load)
        while (event := await self._process.event()) is not None:
            if event["event"] == "phase":
                self.doing = event["phase"]
                LOG.info("worker %d: %s", self.number, self.doing)
            elif event["event"] == "unusable":
                self.phase, self.problem = Phase.UNUSABLE, event["message"]
                return False
            elif event["event"] == "loaded":
                self.state = state_of(event["state"])
                self.phase, self.doing = Phase.READY, "ready"
                return True
        return False

    async def _draw_jobs(self) -> bool:
        """Draw until the worker ends; return True if it was unloaded and is wanted again."""
        while True:
            self.phase = Phase.READY
            taking = asyncio.create_task(self.line.take(self.lora))
            watching = asyncio.create_task(self._event())
            try:
                await asyncio.wait({taking, watching}, timeout=self.idle_s, return_when="FIRST_COMPLETED")
            finally:
                if not taking.done():
                    taking.cancel()
                if not watching.done():
                    watching.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watching
            if taking.done() and not taking.cancelled():
                job = taking.result()
                if watching.done() and not watching.cancelled() and watching.result() is None:
                    self.line.leave(job)
                    await self.line.put(job, first=True)  # it was not sent, so this death is not its own
                    return False
                if not await self._draw(job):
                    return False
            elif watching.done() and not watching.cancelled():
                return False  # it ended while it waited
            else:
                await self._unload()
                return True

    async def _event(self) -> dict[str, Any] | None:
        assert self._process is not None
        return await self._process.event()

    async def _unload(self) -> None:
        """End the idle worker, and wait for a job."""
        assert self._process is not None
        await self._process.stop()
        self.phase, self.doing, self.memory = Phase.UNLOADED, "unloaded; the next request loads it again", {}
        job = await self.line.take(None)
        self.line.leave(job)
        await self.line.put(job, first=True)

    async def _draw(self, job: ImageJob) -> bool:
        """Draw a job; return whether the worker is still alive."""
        assert self._process is not None
        if job.has_ended:
            self.line.leave(job)
            return True
        self.phase, self._job = Phase.DRAWING, job
        self.ledger.move(job, State.RUNNING)
        job.began_at = time.monotonic()
        name = None if job.lora is None else job.lora.name
        self.num_exchanges += name != self.lora
        self.lora = name
        lora = None if job.lora is None else (str(job.lora.path), job.lora.scale)
        await self._process.send(Draw(job.id, job.prompt, job.seed, job.call, lora, job.partials))
        while (event := await self._event()) is not None:
            if event.get("id") != job.id:
                continue
            if event["event"] == "step":
                self._note_step(job, event)
                continue
            self._note_end(job, event)
            self.line.leave(job)
            self._job = None
            return True
        self.line.leave(job)
        await self._again(job)
        self._job = None
        return False

    async def _again(self, job: ImageJob) -> None:
        """Let a job whose worker died be drawn again, once."""
        job.attempts += 1
        if job.has_ended:
            return
        if job.attempts >= _MOST_ATTEMPTS:
            LOG.error("%s: %d workers died while they drew it; it is given up", job.id, job.attempts)
            self.ledger.fail(job, JobError(503, "the worker died twice while it drew this image"))
            return
        self.ledger.move(job, State.WAITING)
        await self.line.put(job, first=True)

    def _note_step(self, job: ImageJob, event: dict[str, Any]) -> None:
        if job.on_step is not None:
            job.on_step(event["step"])
        if "file" in event:
            partial = read_drawn(job, event)
            if job.on_partial is not None and not job.has_ended:
                job.on_partial(event["step"], partial)

    def _note_end(self, job: ImageJob, event: dict[str, Any]) -> None:
        match event["event"]:
            case "drawn":
                drawn = read_drawn(job, event)
                self.memory = {name: event[name] for name in ("rss_bytes", "gpu_bytes") if name in event}
                if "energy_j" in event:
                    self.energy_j = (self.energy_j or 0.0) + event["energy_j"]
                self.on_drawn(job, event)
                self.ledger.finish(job, drawn)
            case "cancelled":
                self.ledger.fail(job, JobError(499, "the request was cancelled"), State.CANCELLED)
            case "refused":
                self.ledger.fail(job, JobError(400, event["message"]))
            case _:
                LOG.error("%s failed: %s", job.id, event.get("message"))
                self.ledger.fail(job, JobError(500, f"drawing failed: {event.get('message')}"))

    async def cancel(self, job: ImageJob) -> None:
        """End a job that this worker draws; kill the worker if it does not end it in time."""
        if self._job is not job or self._process is None:
            return
        process = self._process
        await process.send(Cancel(job.id))
        for _ in range(int(10 * _CANCEL_GRACE_S)):
            await asyncio.sleep(0.1)
            if self._job is not job or self._process is not process:
                return
        LOG.error("%s does not end; worker %d is killed", job.id, self.number)
        process.kill()


def read_drawn(job: ImageJob, event: dict[str, Any]) -> Drawn:
    """Return the image of an event, and remove its file."""
    path = Path(event["file"])
    pixels = path.read_bytes()
    path.unlink()
    return Drawn(pixels, event["width"], event["height"], job.seed, event.get("phases", {}))


def state_of(fields: dict[str, Any]) -> ModelState:
    """Return what a worker reports of its model."""
    return ModelState(
        **{name: fields[name] for name in ("name", "recipe", "device", "steps", "guidance", "multiple")},
        size=Size(*fields["size"]),
        takes=frozenset(fields["takes"]),
        guided_above=fields["guided_above"],
        speeds={
            Size(width, height): Speed(step_s, rest_s) for width, height, step_s, rest_s in fields["speeds"]
        },
        has_partials=fields["has_partials"],
        notes=tuple(fields["notes"]),
    )
