"""Workers on a Ray cluster: each in an actor, which Ray places on a node with a free GPU.

The line, the replicas and the images' folder are those of one machine. An actor passes messages to the process beside
it, and events and pixels back. If a node is lost, its image is drawn again elsewhere, by an actor that Ray places anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vivace.benchmark.places.ray_nodes import check_answers
from vivace.errors import Unsupported
from vivace.serve.queue.messages import Draw, ImageFolder, Load, Message, parsed, remove_images, written
from vivace.serve.queue.process import COMMAND, Workers
from vivace.serve.settings import ServeSettings

LOG = logging.getLogger("vivace.serve")
_PAUSE_S = 1.0
_ENDS = ("drawn", "refused", "failed", "cancelled")
Files = dict[str, bytes]


class WorkerActor:
    """The code that runs in an actor: a worker process, whose files are those of a folder of its own."""

    def __init__(self, model: str, recipe: str, device: str, command: tuple[str, ...]) -> None:
        settings = ServeSettings(model=model, recipe=recipe, device=device)
        self._workers = Workers(settings, command)
        self._folder = ImageFolder()

    async def start(self) -> None:
        """Start a worker, after the one before has ended."""
        self._process = self._workers.make(None)
        await self._process.start()

    async def send(self, line: bytes, files: Files, before: object) -> None:
        """Send a message with the files of its pictures; `before` is the result of the last call, so that messages keep
        their order."""
        message = parsed(line)
        if isinstance(message, Load):
            message = dataclasses.replace(message, folder=str(self._folder.path))
        elif isinstance(message, Draw):
            for name, pixels in files.items():
                (self._folder.path / name).write_bytes(pixels)
            here = [
                dataclasses.replace(each, file=str(self._folder.path / Path(each.file).name))
                for each in message.pictures
            ]
            message = dataclasses.replace(message, pictures=tuple(here))
        self._process.send(message)

    async def events(self) -> AsyncIterator[tuple[dict[str, Any], Files]]:
        """Yield the worker's events with their images' files; the last one describes its end."""
        while (event := await self._process.event()) is not None:
            event.pop("at", None)  # clocks of two machines differ
            files = [Path(image["file"]) for image in event.get("images", ())]
            pixels = {file.name: file.read_bytes() for file in files}
            for file in files:
                file.unlink()
            if event["event"] in _ENDS:
                remove_images(self._folder.path, [event["id"]])
            yield event, pixels
        message = await self._process.ended()
        await self._process.stop()
        yield {"event": "ended", "message": message}, {}

    async def kill(self) -> None:
        self._process.kill()


class RayWorkers:
    """Makes the workers of a server on a cluster; Unsupported if Ray is not installed, no cluster answers, or it has no
    GPU."""

    def __init__(self, settings: ServeSettings, command: tuple[str, ...] = COMMAND) -> None:
        address = settings.ray_address or "auto"
        self._ray = _connected(address)
        num_gpus = 0 if settings.device == "cpu" else int(self._ray.cluster_resources().get("GPU", 0))
        if settings.device == "cuda" and not num_gpus:
            raise Unsupported(f"--ray {address}: the cluster has no GPUs; use --device cpu")
        self.num_steady, most = settings.replicas or (max(1, num_gpus), max(1, num_gpus))
        self.places: tuple[str | None, ...] = tuple(map(str, range(1, most + 1)))
        self._kind = self._ray.remote(
            num_cpus=settings.threads or 1, num_gpus=min(1, num_gpus), max_restarts=0, max_task_retries=0
        )(WorkerActor)
        self._arguments = settings.model, settings.recipe, settings.device, command
        self._actors: dict[str | None, Any] = {}

    def make(self, place: str | None) -> RayWorker:
        return RayWorker(self, place)

    async def actor(self, place: str | None) -> Any:
        """Return the actor of a place, in which a worker has been started; wait until Ray has placed it."""
        while True:
            actor = self._actors.get(place) or self._kind.remote(*self._arguments)
            self._actors[place] = actor
            try:
                await actor.start.remote()
            except self._ray.exceptions.RayError as error:
                LOG.warning("worker %s is not placed: %s", place, _first_line(error))
                self.remove(place)
                await asyncio.sleep(_PAUSE_S)
            else:
                return actor

    def remove(self, place: str | None) -> None:
        if (actor := self._actors.pop(place, None)) is not None:
            self._ray.kill(actor)

    async def stop(self) -> None:
        self._ray.shutdown()


class RayWorker:
    """One worker process in an actor; see `process.WorkerProcess`."""

    def __init__(self, workers: RayWorkers, place: str | None) -> None:
        self._workers, self._place = workers, place
        self._actor: Any = None
        self._last: Any = None
        """The call of the last message."""
        self._folder = Path()
        self._end: str | None = None
        self.pid: int | None = None
        self.started_at = 0.0

    async def start(self) -> None:
        self._actor = await self._workers.actor(self._place)
        self.started_at = time.monotonic()
        self._events = self._actor.events.options(num_returns="streaming").remote()

    def send(self, message: Message) -> None:
        files = {}
        if isinstance(message, Load):
            self._folder = Path(message.folder)
        elif isinstance(message, Draw):
            paths = [Path(picture.file) for picture in message.pictures]
            files = {path.name: path.read_bytes() for path in paths}
        self._last = self._actor.send.remote(written(message), files, self._last)

    async def event(self) -> dict[str, Any] | None:
        from ray.exceptions import RayError

        try:
            event, files = await (await anext(self._events))
        except (RayError, StopAsyncIteration) as error:
            self._end = f"its actor was lost: {_first_line(error)}"
            self._workers.remove(self._place)
            return None
        if event["event"] == "ended":
            self._end = event["message"]
            return None
        for name, pixels in files.items():
            (self._folder / name).write_bytes(pixels)
        for image in event.get("images", ()):
            image["file"] = str(self._folder / Path(image["file"]).name)
        result: dict[str, Any] = event
        return result

    def kill(self) -> None:
        self._actor.kill.remote()

    async def ended(self) -> str:
        return self._end or "it ended"

    async def stop(self, *, at_once: bool = False) -> None:
        """End the worker. The actor stays for the next one if this one has ended by itself."""
        if at_once or self._end is None:
            self._workers.remove(self._place)


def _connected(address: str) -> Any:
    """Return the module `ray`, connected to a cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls to lost actors, which events tell
    try:
        import ray
    except ImportError as error:
        raise Unsupported(f"--ray needs Ray: pip install ray on every node ({error})") from None
    check_answers(address)
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Unsupported(
            f"--ray {address}: no Ray cluster was reached ({_first_line(error)}); start one with `ray start --head`"
        ) from None
    return ray


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
