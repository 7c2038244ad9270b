"""A worker process from the server's side: started, spoken to, killed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from vivace.foundation.processes.launcher import ended_by, kill_group
from vivace.foundation.processes.protocol import parse_event
from vivace.foundation.processes.start import start_async
from vivace.serve.queue.messages import Message, written

COMMAND = (sys.executable, "-m", "vivace.serve.worker.main")
WITH_GPU = "--open-gpu"
"""Makes a worker create its context on the GPU while it imports."""
_GRACE_S = 5.0


class WorkerProcess:
    """One worker process.

    Args:
        variables: environment variables besides this process's own.

    Attributes:
        started_at: `time.monotonic()` of its start.
    """

    def __init__(
        self, command: tuple[str, ...] = COMMAND, variables: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._variables = dict(variables or {})
        self._process: asyncio.subprocess.Process | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, unless it is started already."""
        if self._process is not None:
            return
        self.started_at = time.monotonic()
        self._process = await start_async(self._command, self._variables)

    def send(self, message: Message) -> None:
        """Send a message. A death of the process is noticed by `event`.

        It does not wait until the process reads the message: a hanging process could not be killed then. A worker has
        two messages at most, so that few bytes are kept meanwhile.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(written(message))

    async def event(self) -> dict[str, Any] | None:
        """Wait for the next event; None if the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if (event := parse_event(line)) is not None:
                return event
        return None

    def kill(self) -> None:
        """Kill the process and its descendants."""
        if self._process is not None:
            _kill(self._process)

    async def ended(self) -> str:
        """Wait for the end of a process that closed its output, and describe it."""
        assert self._process is not None
        try:
            status = await asyncio.wait_for(self._process.wait(), _GRACE_S)
        except TimeoutError:
            self.kill()
            status = await self._process.wait()
        by = ended_by(status)
        return f"it exited with status {status}" if by is None else f"it was ended by {by}"

    async def stop(self, *, at_once: bool = False) -> None:
        """End the process: it ends by itself when its input does. Close its pipes.

        Args:
            at_once: kill it.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        if at_once:
            _kill(process)
        try:
            await asyncio.wait_for(process.stdout.read(), _GRACE_S)
        except TimeoutError:
            _kill(process)
            await process.stdout.read()
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        kill_group(process.pid)
