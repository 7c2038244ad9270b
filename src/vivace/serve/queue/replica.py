"""A replica: a worker that is kept alive, and draws one job after the other.

The worker has at most two messages: the one that it draws, and the next, which is sent when the first is nearly drawn,
and begun while the pixels of the first are copied. A job counts as running once it is drawn. If the worker dies, that
death counts against the jobs that it had begun; they are drawn again with no other beside them, so that it is certain
whose the next death is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, JobQueue, Ledger, State
from vivace.serve.queue.messages import Cancel, Draw, Load, Message, SentPicture, image_file, remove_images
from vivace.serve.queue.startup import Startup
from vivace.serve.settings import STATE, ModelState

LOG = logging.getLogger("vivace.serve")
_Result = TypeVar("_Result")
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
_MOST_ATTEMPTS = 2
"""Workers that may die while they draw a job: it is drawn again once."""
_CANCEL_GRACE_S = 30.0
"""Seconds until a worker that does not end a cancelled job is killed."""
_SILENCE = 5.0
"""How many times the seconds of a whole image a worker that draws may give no sign of life."""
_LEAST_SILENCE_S = 20.0
_FIRST_SILENCE_S = 900.0
"""Likewise for what the worker has not drawn yet, or compiles: kernels are compiled, and graphs captured."""
_AHEAD_S = 0.25
"""Seconds before the end of the current jobs at which the next are sent, so that the worker does not wait."""
_BUSY_S = 20.0
"""Predicted seconds of waiting at which a spare worker starts."""
_SPARE_IDLE_S = 300.0
_LOOK_S = 1.0


class Worker(Protocol):
    """A worker process, here or on another machine (`pid` is None); `started_at` is its start by `time.monotonic()`."""

    pid: int | None
    started_at: float

    async def start(self) -> None: ...

    def send(self, message: Message) -> None: ...

    async def event(self) -> dict[str, Any] | None: ...

    def kill(self) -> None: ...

    async def ended(self) -> str: ...

    async def stop(self, *, at_once: bool = False) -> None: ...


@dataclass(eq=False)
class InFlight:
    """Jobs of a worker: sent by one message, drawn by one call, and ended by one event.

    Attributes:
        is_nearly_drawn: so that the next message may be sent.
        is_compiling: whether the worker said so after its last step.
        is_called: whether its session has returned; the image comes later, and the next message is begun.
    """

    jobs: list[ImageJob]
    is_nearly_drawn: bool = False
    has_begun: bool = False
    is_compiling: bool = False
    is_called: bool = False

    @property
    def id(self) -> str:
        return self.jobs[0].id

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the time of the first of its kind depends on: compiled code and graphs."""
        first = self.jobs[0]
        return first.task, first.size, len(self.jobs), first.lora is None, "negative_prompt" in first.call

    def message(self, folder: Path) -> Draw:
        """Return the message to the worker, and write the images that the job starts from."""
        first = self.jobs[0]
        pictures = []
        for number, picture in enumerate(first.pictures):
            path = image_file(folder, first.id, f"from-{number}")
            path.write_bytes(picture.pixels)
            pictures.append(
                SentPicture(picture.argument, picture.mode, picture.width, picture.height, str(path))
            )
        return Draw(
            ids=tuple(job.id for job in self.jobs),
            prompts=tuple(job.prompt for job in self.jobs),
            seeds=tuple(job.seed for job in self.jobs),
            call=first.call,
            lora=None if first.lora is None else (str(first.lora.path), first.lora.scale),
            partials=first.partials,
            task=first.task,
            pictures=tuple(pictures),
        )

    def note_step(self, event: dict[str, Any]) -> None:
        """Forward a step, with its partial images."""
        first, step = self.jobs[0], event["step"]
        left_s = first.predicted_s * (1 - step / max(1, first.steps))
        self.is_nearly_drawn |= step >= first.steps - 1 or left_s <= _AHEAD_S
        for job, image in zip(self.jobs, event.get("images", ()), strict=False):
            try:
                partial = read_drawn(job, image, {})
            except OSError as error:
                LOG.warning("%s: a partial image is lost: %s", job.id, error.strerror)
                continue
            if job.on_partial is not None and not job.has_ended:
                job.on_partial(step, partial)

    def note_end(
        self,
        event: dict[str, Any],
        ledger: Ledger,
        on_drawn: Callable[[ImageJob, dict[str, Any]], None],
    ) -> list[ImageJob]:
        """End the jobs as the worker's last event says; return those to draw again, each alone."""
        message = str(event.get("message"))
        if event["event"] in ("refused", "failed") and len(self.jobs) > 1:
            again = [job for job in self.jobs if not job.has_ended]
            for job in again:
                job.is_alone = True
                ledger.move(job, State.WAITING)
            LOG.warning("%d images failed together and are drawn one by one: %s", len(self.jobs), message)
            return again
        if event["event"] == "drawn":
            for job, image in zip(self.jobs, event["images"], strict=True):
                try:
                    drawn = read_drawn(job, image, event["phases"], tuple(event.get("notes", ())))
                except OSError as error:
                    ledger.fail(job, JobError(500, f"the image is lost: {error.strerror}"))
                    continue
                if not job.has_ended:
                    on_drawn(job, event)
                    ledger.finish(job, drawn)
            return []
        for job in self.jobs:
            match event["event"]:
                case "cancelled":
                    ledger.fail(job, JobError(499, "the request was cancelled"), State.CANCELLED)
                case "refused":
                    ledger.fail(job, JobError(400, message))
                case _:
                    LOG.error("%s failed: %s", job.id, message)
                    ledger.fail(job, JobError(500, f"drawing failed: {message}"))
        return []


def read_drawn(
    job: ImageJob, image: dict[str, Any], phases: dict[str, float], notes: tuple[str, ...] = ()
) -> Drawn:
    path = Path(image["file"])
    pixels = path.read_bytes()
    path.unlink()
    return Drawn(pixels, image["width"], image["height"], job.seed, phases, notes)


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAWING = "drawing"
    SILENT = "silent"
    WAITING_TO_RESTART = "waiting to restart"
    UNLOADED = "unloaded"
    UNUSABLE = "unusable"


@dataclass(eq=False)
class Replica:
    """One worker and its jobs.

    Attributes:
        key: what is started, see `startup.key_of`.
        doing: what the worker does, in words; `starting` is the progress of its start.
        state: of the model, once it is loaded.
        energy_j: joules of the GPU from when it was ready to its last image; None without a counter.
        idle_s: seconds without a job after which the worker ends; None for never.
        is_spare: whether it starts only while many images wait.
        failed_starts: since the model was loaded last.
        on_drawn: called with each finished job and the event of the worker.
    """

    number: int
    load: Load
    line: JobQueue
    ledger: Ledger
    make_process: Callable[[], Worker]
    on_drawn: Callable[[ImageJob, dict[str, Any]], None]
    key: str
    idle_s: float | None = None
    is_spare: bool = False
    phase: Phase = Phase.STARTING
    doing: str = "starting"
    starting: Startup | None = None
    state: ModelState | None = None
    problem: str = ""
    lora: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    num_restarts: int = 0
    num_exchanges: int = 0
    failed_starts: int = 0
    energy_j: float | None = None
    _process: Worker | None = None
    _sent: list[InFlight] = field(default_factory=list)
    _known: set[tuple[Any, ...]] = field(default_factory=set)
    """The kinds of jobs that this worker has drawn."""

    @property
    def is_able(self) -> bool:
        """Whether it draws, or will on request."""
        return self.phase in (Phase.READY, Phase.DRAWING, Phase.UNLOADED)

    @property
    def accepts(self) -> bool:
        """Whether jobs may wait for it: it is able, or has drawn and starts again, at which nothing has failed yet."""
        is_starting = self.state is not None and self.failed_starts == 0 and self.phase is not Phase.SILENT
        return self.is_able or is_starting

    async def run(self) -> None:
        """Keep a worker alive and let it draw, until this task is cancelled."""
        try:
            if self.is_spare:
                await self._until_needed()
            while True:
                loaded = await self._start()
                if self.phase is Phase.UNUSABLE:
                    return
                self.failed_starts = 0 if loaded else self.failed_starts + 1
                assert self._process is not None
                if loaded and await self._draw_jobs():
                    await self._process.stop()
                    await self._until_needed()
                    continue
                end = await self._process.ended()
                await self._process.stop()
                end, self.problem = self.problem or end, ""
                self.num_restarts += 1
                pause = _BACK_OFF_S[min(self.failed_starts, len(_BACK_OFF_S) - 1)]
                self.phase, self.doing = Phase.WAITING_TO_RESTART, f"restarting in {pause:g} s: {end}"
                LOG.warning("worker %d ended: %s; it starts again in %g s", self.number, end, pause)
                await asyncio.sleep(pause)
        finally:
            if self._process is not None:
                await self._process.stop(at_once=True)

    async def _start(self) -> bool:
        self.phase, self.doing, self.lora = Phase.STARTING, "starting", None
        self._known.clear()
        self._process = self.make_process()
        await self._process.start()
        key = self.key if self.state is None else f"{self.key} | again"  # libraries are there already
        self.starting = starting = Startup(key, self._process.started_at)
        LOG.info("worker %d starts: %s", self.number, starting.expectation)
        try:
            self._process.send(replace(self.load, is_restart=self.state is not None))
            return await self._loaded(starting)
        finally:
            self.starting = None

    async def _loaded(self, starting: Startup) -> bool:
        """Follow the worker until it has loaded the model; return False if it never will."""
        assert self._process is not None
        while (event := await self._next_event(starting)) is not None:
            if event["event"] == "phase":
                self.doing = event["phase"]
                starting.enter(self.doing, event.get("at"))
                LOG.info("worker %d: %s (after %.1f s)", self.number, self.doing, starting.seconds)
            elif event["event"] == "unusable" and self.state is not None:  # it worked before, and may again
                self.problem = f"it cannot load the model again: {event['message']}"
                return False
            elif event["event"] == "unusable":
                self.phase, self.problem = Phase.UNUSABLE, event["message"]
                self.doing = f"it will never draw: {self.problem}"
                if self.line.num_workers():  # else it is the error with which the command ends
                    LOG.error("worker %d cannot be used: %s", self.number, self.problem)
                return False
            elif event["event"] == "loaded":
                self.state = STATE.validate_python(event["state"])
                self._log(self.state)
                self.phase, self.doing = Phase.READY, "ready"
                LOG.info("worker %d: %s", self.number, starting.finish())
                return True
        return False

    async def _next_event(self, starting: Startup) -> dict[str, Any] | None:
        """Return the next event of a worker that starts; None once it has ended. One that hangs is killed."""
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.event(), starting.left_s)
        except TimeoutError:
            self.problem = starting.complaint
            self._process.kill()
            return None

    def _log(self, state: ModelState) -> None:
        for note in state.notes:
            LOG.warning("worker %d: %s", self.number, note)
        for path, reason in state.unfit_loras.items():
            LOG.warning("worker %d: the LoRA %s cannot be used: %s", self.number, Path(path).stem, reason)
        for task, reason in state.edits.refused.items():
            LOG.warning("worker %d: the task %s is not served: %s", self.number, task, reason)
        for size, batching in state.batching.items():
            gains = ", ".join(f"{number}: {gain:.2f}x" for number, gain in batching.gains.items())
            allowed = ", ".join(map(str, batching.allowed)) or "none"
            LOG.info("worker %d: %s, images at once gain %s; formed: %s", self.number, size, gains, allowed)

    async def _draw_jobs(self) -> bool:
        """Draw until the worker ends, or is idle for so long that it is to end, and return True."""
        assert self._process is not None
        self.phase = Phase.READY
        reading = asyncio.create_task(self._process.event())
        taking: asyncio.Task[list[ImageJob]] | None = None
        try:
            while True:
                if taking is None and self._may_take():
                    taking = asyncio.create_task(self._take())
                awaited = {reading} if taking is None else {reading, taking}
                idle_s = _SPARE_IDLE_S if self.is_spare else self.idle_s
                patience_s = self._patience_s() if self._sent else idle_s
                done, _ = await asyncio.wait(awaited, timeout=patience_s, return_when="FIRST_COMPLETED")
                if not done and not self._sent:
                    break  # idle for long
                if not done:
                    self._end_silent(patience_s or 0.0)
                elif reading in done:
                    if self.phase is Phase.SILENT:
                        self.phase, self.doing = Phase.DRAWING, "ready"
                    if (event := reading.result()) is None:
                        return False
                    await self._note(event)
                    reading = asyncio.create_task(self._process.event())
                elif taking is not None and taking in done:
                    jobs, taking = taking.result(), None
                    await self._send(jobs)
        finally:
            await _ended(reading)
            if taking is not None:
                await self._put_back(await _ended(taking) or [])
            await self._lose_sent()
        return True

    def _patience_s(self) -> float:
        """Return how long the worker may be silent from now on, while it has jobs: half of it, then as much again."""
        first = self._sent[0]
        usual_s = sum(job.predicted_s for job in first.jobs) * max(1.0, self.line.pace)
        is_usual = not first.is_compiling and (first.kind in self._known or self._is_warmed(first))
        return max(_LEAST_SILENCE_S, _SILENCE * usual_s) / 2 if is_usual else _FIRST_SILENCE_S / 2

    def _is_warmed(self, sent: InFlight) -> bool:
        """Return whether the worker has drawn such images before it said that it is ready."""
        first = sent.jobs[0]
        is_plain = len(sent.jobs) == 1 and first.lora is None and "negative_prompt" not in first.call
        return is_plain and self.state is not None and first.size in self.state.speeds

    def _end_silent(self, seconds: float) -> None:
        """Say that the worker is silent; end it if it has been for twice as long."""
        assert self._process is not None
        if self.phase is not Phase.SILENT:
            self.phase, self.doing = Phase.SILENT, f"no sign of life for {seconds:.0f} s while it draws"
            LOG.warning("worker %d: %s", self.number, self.doing)
            return
        self.problem = f"it hung: no sign of life for {2 * seconds:.0f} s while it drew"
        LOG.error("worker %d: %s; it is killed, and its image drawn again", self.number, self.problem)
        self._process.kill()

    def _may_take(self) -> bool:
        if not self._sent:
            return True
        (first, *others) = self._sent
        has_died = any(job.attempts for job in first.jobs)  # and whose the next death is must be certain
        return not others and first.is_nearly_drawn and not has_died

    async def _take(self) -> list[ImageJob]:
        state = self.state
        assert state is not None
        return await self.line.take(
            self.lora, lambda: not self._sent, lambda job: () if job.attempts else state.batches_of(job.size)
        )

    async def _until_needed(self) -> None:
        """Wait without a worker for a job, or a spare one for many of them."""
        self.phase, self.doing, self.memory = Phase.UNLOADED, "unloaded; the next request loads it again", {}
        if not self.is_spare:
            await self._put_back(await self.line.take(None))
            return
        self.doing = "not needed; it starts when many images wait"
        while self.line.seconds() < _BUSY_S:
            await asyncio.sleep(_LOOK_S)

    async def _send(self, jobs: list[ImageJob]) -> None:
        """Send jobs to the worker, which draws them at once or after those before."""
        assert self._process is not None
        for job in jobs:
            if job.deadline <= time.monotonic():  # a stream that never began has no waiting reader
                self.ledger.fail(job, JobError(504, "the time of the request ended while it waited"))
            if job.has_ended:
                self.line.leave(job)
        jobs = [job for job in jobs if not job.has_ended]
        if not jobs:
            return
        sent = InFlight(jobs)
        try:
            message = sent.message(Path(self.load.folder))
        except OSError as error:
            self._leave(sent)
            for job in jobs:
                self.ledger.fail(
                    job, JobError(500, f"the image cannot be sent to the worker: {error.strerror}")
                )
            return
        name = None if jobs[0].lora is None else jobs[0].lora.name
        self.num_exchanges += name != self.lora
        self.lora = name
        self._sent.append(sent)
        self._begin()
        self._process.send(message)

    def _begin(self) -> None:
        """Note that the worker draws the next of its jobs, unless it draws some."""
        sent = next((each for each in self._sent if not each.is_called), None)
        if sent is None or sent.has_begun:
            return
        self.phase = Phase.DRAWING
        for job in sent.jobs:
            self.ledger.move(job, State.RUNNING)
            job.began_at = time.monotonic()
            self.line.begin(job)
        sent.has_begun, sent.is_nearly_drawn = True, sent.jobs[0].predicted_s <= _AHEAD_S

    async def _note(self, event: dict[str, Any]) -> None:
        sent = next((each for each in self._sent if each.id == event.get("id")), None)
        if sent is None:
            return
        if event["event"] in ("step", "compiling"):
            sent.is_compiling = event["event"] == "compiling"
            if not sent.is_compiling:
                sent.note_step(event)
            return
        if event["event"] == "called":
            sent.is_called = sent.is_nearly_drawn = True
            self._begin()
            return
        self.memory = {
            name: event[name] for name in ("rss_bytes", "gpu_bytes") if name in event
        } or self.memory
        if "energy_j" in event:
            self.energy_j = (self.energy_j or 0.0) + event["energy_j"]
        if event["event"] == "drawn":
            self._known.add(sent.kind)
        if event["event"] == "drawn" and len(sent.jobs) == 1:
            self.line.note_drawn(sent.jobs[0].predicted_s, event["seconds"])
        again = sent.note_end(event, self.ledger, self.on_drawn)
        self._sent.remove(sent)
        self._leave(sent)
        await self._put_back(again)
        if not self._sent:
            self.phase = Phase.READY
            await self.line.look_again()

    def _leave(self, sent: InFlight) -> None:
        remove_images(Path(self.load.folder), (job.id for job in sent.jobs))
        for job in sent.jobs:
            self.line.leave(job)

    async def _put_back(self, jobs: list[ImageJob]) -> None:
        """Put jobs that no worker draws first in the line."""
        for job in reversed(jobs):
            self.line.leave(job)
            if not job.has_ended:
                await self.line.put(job, first=True)

    async def _lose_sent(self) -> None:
        """Let the jobs of a worker that died be drawn again: once those that it had begun, and those that waited for
        them as if they had never been sent."""
        lost, self._sent = self._sent, []
        for sent in lost:
            self._leave(sent)
            for job in sent.jobs:
                if sent.has_begun and not job.has_ended:
                    self._count_attempt(job)
        for sent in reversed(lost):
            await self._put_back(sent.jobs)

    def _count_attempt(self, job: ImageJob) -> None:
        job.attempts += 1
        if job.attempts >= _MOST_ATTEMPTS:
            LOG.error("%s: %d workers died while they drew it; it is given up", job.id, job.attempts)
            self.ledger.fail(job, JobError(503, "the worker died twice while it drew this image"))
            return
        self.ledger.move(job, State.WAITING)

    def has(self, job: ImageJob) -> bool:
        return any(job in sent.jobs for sent in self._sent)

    async def cancel(self, job: ImageJob) -> None:
        """End a job that this worker has; kill the worker if it does not end it in time."""
        sent = next((sent for sent in self._sent if job in sent.jobs), None)
        if sent is None or self._process is None:
            return
        process = self._process
        process.send(Cancel(job.id))
        if not all(each.has_ended for each in sent.jobs):
            return  # others' images are drawn by the same call
        for _ in range(int(10 * _CANCEL_GRACE_S)):
            await asyncio.sleep(0.1)
            if sent not in self._sent or self._process is not process:
                return
        if sent.has_begun:
            LOG.error("%s does not end; worker %d is killed", job.id, self.number)
            process.kill()


async def _ended(task: asyncio.Task[_Result]) -> _Result | None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task
    return None if task.cancelled() or task.exception() else task.result()
