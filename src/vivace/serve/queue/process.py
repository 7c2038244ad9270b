"""Worker processes from the server's side: started, spoken to, killed.

On Linux a template imports libraries once, and forks each worker in milliseconds. Elsewhere each worker is a process
that imports them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vivace.foundation.processes.launcher import ended_by, kill_group, start_async
from vivace.foundation.processes.protocol import parse_event
from vivace.foundation.processes.system import is_linux
from vivace.serve.queue.messages import Message, written

if TYPE_CHECKING:
    from vivace.serve.settings import ServeSettings

COMMAND = (sys.executable, "-m", "vivace.serve.worker.main")
WITH_GPU = "--open-gpu"
"""Makes a worker create its context on the GPU before it is told what to load."""
TEMPLATE = "--template"
"""Makes a process fork workers as it is ordered on its standard input, a socket; the model's name follows."""
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets libraries ask PyTorch for a GPU while they are imported, without a call of CUDA, which no fork survives."""
_GRACE_S = 5.0


class Workers:
    """Makes the worker processes of a server, with further environment variables; see `pool.WorkerSource`."""

    def __init__(
        self,
        settings: ServeSettings,
        command: tuple[str, ...] = COMMAND,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._command = command if settings.device == "cpu" else (*command, WITH_GPU)
        self._model = settings.model
        self._variables = dict(variables)
        self._templates: list[Template] = []
        self._starting = asyncio.Lock()
        self.places: tuple[str | None, ...] = settings.gpus or (None,)
        self.num_steady = len(self.places)

    async def template(self) -> Template | None:
        """Return the template, started if there is none that lives; None where each worker is a process of its own."""
        if not is_linux():
            return None
        async with self._starting:
            if not self._templates or self._templates[-1].has_ended:
                self._templates.append(await Template.start((*self._command, TEMPLATE, self._model)))
            return self._templates[-1]

    def make(self, place: str | None) -> WorkerProcess:
        """Return a process that is not started yet, on a GPU, by its UUID or index, or on the default device."""
        variables = self._variables if place is None else self._variables | {"CUDA_VISIBLE_DEVICES": place}
        return WorkerProcess(self._command, variables, self.template)

    async def stop(self) -> None:
        for template in self._templates:
            await template.stop()


class Template:
    """A process that imports the libraries and forks workers, which outlive it. It is ready once it has forked one."""

    def __init__(self, process: asyncio.subprocess.Process, orders: socket.socket, began: float) -> None:
        self._process, self._orders, self.began = process, orders, began
        self.is_ready = False
        self._workers: list[WorkerProcess] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: tuple[str, ...]) -> Template:
        began = time.monotonic()
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return cls(await start_async(command, _NO_CUDA, theirs.fileno()), orders, began)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def _read(self) -> None:
        """Note the ends of workers, and of those that outlive this process."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                if (event := parse_event(line)) is not None:
                    self._workers[event["number"]].note_end(event["status"])
            self._orders.close()
            await asyncio.gather(*(worker.follow() for worker in self._workers))
        finally:  # the loop's end cancels this task before those that wait for workers
            for worker in self._workers:
                worker.note_end(None)

    def fork(self, worker: WorkerProcess, variables: Mapping[str, str], files: tuple[int, int]) -> None:
        """Order a worker with these files as its standard input and output."""
        order = json.dumps({"number": len(self._workers), "variables": dict(variables)}).encode()
        self._workers.append(worker)
        with contextlib.suppress(OSError):  # it ends just now, and so does the worker
            socket.send_fds(self._orders, [order], files)

    def kill(self) -> None:
        if not self.has_ended:
            kill_group(self._process.pid)

    async def stop(self) -> None:
        self.kill()
        await self._reading
        await self._process.wait()


class WorkerProcess:
    """One worker process, forked by a template if there is one.

    Attributes:
        started_at: `time.monotonic()` of its start, or of its template's if it is the first one of that.
        pid: of the process; None before it is started.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        variables: Mapping[str, str],
        find_template: Callable[[], Awaitable[Template | None]],
    ) -> None:
        self._command, self._variables, self._find_template = command, variables, find_template
        self._template: Template | None = None
        self._input: asyncio.StreamWriter | asyncio.WriteTransport | None = None
        self._output: asyncio.StreamReader | None = None
        self._end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.started_at = 0.0
        self.pid: int | None = None

    async def start(self) -> None:
        self.started_at = time.monotonic()
        self._template = await self._find_template()
        if self._template is not None:
            await self._fork(self._template)
            return
        process = await start_async(self._command, self._variables)
        self.pid, self._input, self._output = process.pid, process.stdin, process.stdout
        self._end = asyncio.create_task(process.wait())

    async def _fork(self, template: Template) -> None:
        from_server, to_worker = os.pipe()
        from_worker, to_server = os.pipe()
        try:
            template.fork(self, self._variables, (from_server, to_server))
        finally:
            os.close(from_server)
            os.close(to_server)
        if not template.is_ready:
            self.started_at = template.began
        loop = asyncio.get_running_loop()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_worker, "wb", 0))
        self._output = output = asyncio.StreamReader()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(from_worker, "rb", 0)
        )

    def note_end(self, status: int | None) -> None:
        """Note how a forked process ended: its exit code, or minus the signal that ended it; None if nobody knows."""
        if not self._end.done():
            self._end.set_result(status)

    async def follow(self) -> None:
        """Wait for the end of a process whose template has ended."""
        if self.pid is not None and not self._end.done():
            await asyncio.to_thread(_wait_for, self.pid)
        self.note_end(None)

    def send(self, message: Message) -> None:
        """Send a message, without waiting until the process reads it: a hanging one could not be killed then."""
        assert self._input is not None
        if not self._input.is_closing():
            self._input.write(written(message))

    async def event(self) -> dict[str, Any] | None:
        """Wait for the next event; None if the process has ended."""
        assert self._output is not None
        while line := await self._output.readline():
            event = parse_event(line)
            if event is not None and event["event"] == "forked" and self._template is not None:
                self.pid, self._template.is_ready = event["pid"], True
            elif event is not None:
                return event
        return None

    def kill(self) -> None:
        """Kill the process and its descendants; before it is forked, its template."""
        if self._end.done():
            return
        if self.pid is not None:
            kill_group(self.pid)
        elif self._template is not None:
            self._template.kill()

    async def ended(self) -> str:
        """Wait for the end of a process that closed its output, and describe it."""
        done, _ = await asyncio.wait({self._end}, timeout=_GRACE_S)
        if not done:
            self.kill()
        status = await self._end
        if status is None:
            return "it ended, and so had its template"
        by = ended_by(status)
        return f"it exited with status {status}" if by is None else f"it was ended by {by}"

    async def stop(self, *, at_once: bool = False) -> None:
        """End the process, which ends by itself when its input does, and close its pipes."""
        if self._input is None or self._output is None:
            return
        self._input.close()
        if at_once:
            self.kill()
        try:
            await asyncio.wait_for(self._output.read(), _GRACE_S)
        except TimeoutError:
            self.kill()
            await self._output.read()
        await self._end
        self._input = self._output = self.pid = None


def _wait_for(pid: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
