"""Start worker processes, send them requests, and return how each request ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vivace.errors import WorkerError
from vivace.foundation.processes.protocol import TIMEOUT, Event, EventReader, LoggedRequest
from vivace.foundation.processes.system import is_posix

OnEvent = Callable[[Event], None]
_START_TIMEOUT_S = 300.0
_GRACE_S = 10.0
LOOK_EVERY_S = 0.1
_FIRST_EXCEPTION = 0xC0000000
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a process."""

    seconds: float
    num_bytes: float

    def excess(self, pid: int, seconds: float) -> str | None:
        """Return the limit that a process exceeded `seconds` after it began; None without one."""
        import psutil

        if seconds > self.seconds:
            return f"{self.seconds:.0f} s"
        try:
            resident = psutil.Process(pid).memory_info().rss
        except psutil.Error:  # it ended
            return None
        return f"{self.num_bytes / 1e9:.1f} GB of memory" if resident > self.num_bytes else None


class LimitWatch:
    """Holds a process to the limits of an event ("limits" in it) until its next one.

    Attributes:
        pid: of the process.
        excess: what it used too much of; None if it was within its limits.
    """

    def __init__(self) -> None:
        self.pid = -1
        self.excess: str | None = None
        self._limits: ProcessLimits | None = None
        self._since = 0.0

    def follow(self, event: dict[str, Any]) -> None:
        """Start watching the limits of an event; an event without limits ends the watch."""
        self._limits = ProcessLimits(**event["limits"]) if event.get("limits") is not None else None
        self._since = time.monotonic()

    def next_look(self, deadline: float) -> float:
        """Return when to check the process again, `deadline` at the latest."""
        return deadline if self._limits is None else min(deadline, time.monotonic() + LOOK_EVERY_S)

    def is_excessive(self) -> bool:
        """Return whether the process is beyond its limits. From then on it has none."""
        assert self._limits is not None
        self.excess = self._limits.excess(self.pid, time.monotonic() - self._since)
        if self.excess is not None:
            self._limits = None
        return self.excess is not None


@dataclass(frozen=True)
class Ending:
    """How a request ended.

    Attributes:
        value: the answer; None if the process died or was killed.
        timed_out: the process was killed because the time limit passed.
        excess: what the process used too much of while it had limits, for which it was killed; see `ProcessLimits`.
        signal: the signal that ended the process, if one did.
        status: the exit status, if the process exited.
        log: the end of its standard output and error.
    """

    value: dict[str, Any] | None
    timed_out: bool = False
    signal: int | None = None
    status: int | None = None
    log: str = ""
    excess: str | None = None

    @property
    def ended_by(self) -> str | None:
        """What ended the process, as `ended_by` names it; None if it exited by itself."""
        return ended_by(-self.signal if self.signal is not None else self.status or 0)


class Launcher:
    """Runs requests one at a time, each in a separate process.

    One worker process forks a child for each request. If forking is not safe, each request gets a fresh process.

    Args:
        command: the worker's command line; the worker calls `resident.serve_requests`.
        tries_gpu: whether requests may use a GPU.
        variables: environment variables of the worker, besides this process's own.

    Attributes:
        forks: whether requests run in forked children; certain after the first request.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        tries_gpu: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.forks = True
        self._command = list(command)
        self._variables = dict(variables or {})
        self._fork_flags = ["--fork", *["--try-gpu"] * tries_gpu]
        self._process: subprocess.Popen[bytes] | None = None
        self._events = EventReader()
        self._folder = tempfile.TemporaryDirectory(prefix="vivace-")

    def kill(self) -> None:
        """Kill the worker, from any thread: a request that runs in another thread then ends."""
        process = self._process
        if process is not None:
            kill_group(process.pid)

    def close(self) -> None:
        """Kill the worker and remove its files."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
        self._folder.cleanup()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, request: LoggedRequest, timeout_s: float, on_event: OnEvent = lambda _: None) -> Ending:
        """Send a request, wait until it ends, and return how it ended. Kills it after `timeout_s` seconds.

        An event that has "limits" holds the process to them (`ProcessLimits`) until its next event.

        Args:
            on_event: called with each event other than the result.

        Raises:
            WorkerError: the worker process could not be started.
        """
        log = Path(self._folder.name) / "log"
        log.write_bytes(b"")
        process = self._ensure_started(log)
        assert process.stdin is not None
        running = _Running(log, time.monotonic() + timeout_s)
        try:
            process.stdin.write(
                request.model_copy(update={"log": str(log)}).model_dump_json().encode() + b"\n"
            )
            process.stdin.flush()
        except OSError:  # a closed pipe: BrokenPipeError, but on Windows EINVAL
            return self._worker_died(running)
        try:
            while (event := self._events.next(running.next_look())) is not None:
                match event.get("event"):
                    case "timeout":
                        running.kill_if_over(process.pid)
                    case "result":
                        running.value = event["value"]
                    case "ended":
                        if not self.forks:
                            self._stop()
                        return running.ending(event["status"])
                    case kind:
                        running.follow(event, is_start=kind == "started")
                        on_event(event)
            return self._worker_died(running)
        except BaseException:
            # On Ctrl-C the child must not keep computing, and the next request must not take its end for its own.
            if running.pid is not None:
                kill_group(running.pid)
            self._await_end()
            raise

    def _await_end(self) -> None:
        """Read the events of an abandoned request until it has ended; stop the worker if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + _GRACE_S
        while (event := self._events.next(deadline)) is not None and event.get("event") != TIMEOUT:
            if event.get("event") == "ended":
                if not self.forks:
                    self._stop()
                return
        kill_group(self._process.pid)
        self._stop()

    def _worker_died(self, running: _Running) -> Ending:
        """Return the ending of a request whose worker process died: it closed its pipe."""
        assert self._process is not None
        status = self._process.wait()
        self._stop()
        return running.ending(status)

    def _stop(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        wait_or_kill(self._process, _GRACE_S)
        self._process.stdout.close()
        self._process = None

    def _ensure_started(self, log: Path) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._stop()
        with log.open("ab") as errors:
            command = [*self._command, *(self._fork_flags if self.forks else [])]
            self._process = process = start(command, self._variables, errors)
        assert process.stdout is not None
        self._events.watch(process.stdout.fileno())
        event = self._events.next(time.monotonic() + _START_TIMEOUT_S)
        if event is None or event.get("event") != "ready":
            kill_group(process.pid)
            self._stop()
            raise WorkerError(f"the worker process did not start: {last_line(_tail(log)) or 'no message'}")
        self.forks = event["forks"]
        return process


class _Running:
    """A request in progress."""

    def __init__(self, log: Path, deadline: float) -> None:
        self.log = log
        self.value: dict[str, Any] | None = None
        self.pid: int | None = None
        self._deadline = deadline
        self._timed_out = False
        self._limits = LimitWatch()

    def next_look(self) -> float:
        return self._limits.next_look(self._deadline)

    def follow(self, event: Event, *, is_start: bool) -> None:
        if is_start:
            self.pid = self._limits.pid = event["pid"]
        else:
            self._limits.follow(event)

    def kill_if_over(self, worker: int) -> None:
        """Kill the process if its time is over or it exceeded its limits."""
        if time.monotonic() < self._deadline:
            if self._limits.is_excessive():
                kill_group(self._limits.pid)
            return
        if self._timed_out:
            kill_group(worker)  # the child survived its kill
        self._timed_out = True
        self._deadline = time.monotonic() + _GRACE_S
        kill_group(worker if self.pid is None else self.pid)

    def ending(self, status: int) -> Ending:
        return Ending(
            value=None if self._timed_out else self.value,
            timed_out=self._timed_out,
            signal=-status if status < 0 else None,
            status=status if status >= 0 else None,
            log=_tail(self.log),
            excess=self._limits.excess,
        )


def _tail(log: Path, limit: int = 64_000) -> str:
    try:
        return log.read_bytes()[-limit:].decode(errors="replace")
    except OSError:
        return ""


def last_line(text: str) -> str:
    """Return the last line that is not blank, at most 300 characters of it; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# A status is the exit code of a process, or minus the signal that ended it. On Windows it is the exit code always.
def kill(pid: int) -> None:
    """Kill a process, and without POSIX also its descendants. A process that has already ended is not an error."""
    if is_posix():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    else:
        _kill_tree(pid)


def kill_group(pid: int) -> None:
    """Kill a process and its group. A process that has already ended is not an error."""
    if is_posix():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill(pid)


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants, where there are no process groups."""
    import psutil

    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in tree:
        with contextlib.suppress(psutil.Error):
            each.kill()


def wait_or_kill(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for the end of a process, kill it after `grace_s` seconds, and return its status."""
    try:
        return process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        return process.wait()


def ended_by(status: int) -> str | None:
    """Return the name of the signal of a status, e.g. "SIGKILL"; None if the process exited by itself.

    Of a process that Windows ended it is the number of the exception, e.g. "0xC0000005".
    """
    if status >= _FIRST_EXCEPTION:
        return f"0x{status:08X}"
    return signal.Signals(-status).name if status < 0 else None


def wait_for_an_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Sleep until one of the processes has ended. With POSIX that is when it closes its end of a pipe."""
    if not is_posix():
        while all(process.poll() is None for process in processes):
            time.sleep(_LOOK_EVERY_S)
        return
    poll = select.poll()
    for process in processes:
        if process.stdout is not None and not process.stdout.closed:
            poll.register(process.stdout.fileno(), 0)
    poll.poll()


_NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # of Windows


def start(command: Sequence[str], variables: Mapping[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process.

    Args:
        variables: environment variables besides this process's own.
        errors: where its standard error goes.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=_environment(variables),
        start_new_session=True,
        creationflags=_NEW_GROUP,
    )


def start_attached(command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    """Start a process with this one's standard input and error, which Ctrl-C reaches.

    Args:
        output: the number of the file that is its standard output.
    """
    return subprocess.Popen(list(command), stdout=output)


async def start_async(
    command: Sequence[str], variables: Mapping[str, str], stdin: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    """Start a process that coroutines wait for. Its standard error is this process's.

    Args:
        stdin: the number of the file that is its standard input; a pipe if it is left out.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(variables),
        start_new_session=True,
        creationflags=_NEW_GROUP,
    )


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # What is sent through the pipes is UTF-8, whatever the terminal's encoding is: cp1252 under Windows.
    return {**os.environ, **variables, "PYTHONIOENCODING": "utf-8"}
