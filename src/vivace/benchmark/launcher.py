"""Start worker processes, send them requests, and return how each request ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vivace.benchmark.requests import AnyRequest, WorkerRequest
from vivace.errors import Unsupported, UnusableModel, WorkerError
from vivace.models.reading import LOOK_EVERY_S, ReadingLimits, complaint

OnEvent = Callable[[dict[str, Any]], None]
WORKER = (sys.executable, "-m", "vivace.benchmark.worker")
_START_TIMEOUT_S = 300.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class Ending:
    """How a request ended.

    Attributes:
        value: the answer; None if the process died or was killed.
        timed_out: the process was killed because the time limit passed.
        excess: what the process used too much of while it read a model, for which it was killed; see `ReadingLimits`.
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


class Launcher:
    """Runs requests one at a time, each in a separate process.

    One worker process forks a child for each request. If forking is not safe (see `vivace.benchmark.worker`), each
    request gets a fresh process.

    Args:
        command: the worker's command line.
        tries_gpu: whether requests may use a GPU.
        variables: environment variables of the worker, besides this process's own.

    Attributes:
        forks: whether requests run in forked children; known after the first request.
    """

    def __init__(
        self,
        command: Sequence[str] = WORKER,
        *,
        tries_gpu: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.forks = True
        self._command = list(command)
        self._variables = dict(variables or {})
        self._fork_flags = ["--fork", *["--try-gpu"] * tries_gpu]
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = _Lines()
        self._folder = tempfile.TemporaryDirectory(prefix="vivace-")

    def kill(self) -> None:
        """Kill the worker, from any thread: a request that runs in another thread then ends."""
        process = self._process
        if process is not None:
            _kill_group(process.pid)

    def close(self) -> None:
        """Kill the worker and remove its files."""
        if self._process is not None:
            _kill_group(self._process.pid)
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

    def run(self, request: WorkerRequest, timeout_s: float, on_event: OnEvent = lambda _: None) -> Ending:
        """Send a request, wait until it ends, and return how it ended. Kills it after `timeout_s` seconds.

        While the process reads a model with limits (an event of phase "load" that has "limits"), it is held to them.

        Args:
            on_event: called with each event other than the result.

        Raises:
            WorkerError: the worker process could not be started.
        """
        log = Path(self._folder.name) / "log"
        log.write_bytes(b"")
        self._ensure_started(log)
        assert self._process is not None
        assert self._process.stdin is not None
        value: dict[str, Any] | None = None
        pid: int | None = None
        timed_out = False
        reading = _Reading()
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(
                request.model_copy(update={"log": str(log)}).model_dump_json().encode() + b"\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._worker_died(None, False, log)
        try:
            while True:
                event = self._lines.next(reading.next_look(deadline))
                if event is None:  # the pipe closed: the worker itself died
                    return replace(self._worker_died(value, timed_out, log), excess=reading.excess)
                kind = event.get("event")
                if kind == "timeout" and time.monotonic() < deadline:
                    if reading.is_excessive():
                        _kill_group(reading.pid)
                elif kind == "timeout":
                    if timed_out:
                        _kill_group(self._process.pid)  # the child survived its kill
                    timed_out = True
                    deadline = time.monotonic() + _GRACE_S
                    _kill_group(pid if pid is not None else self._process.pid)
                elif kind == "started":
                    pid = reading.pid = event["pid"]
                    on_event(event)
                elif kind == "result":
                    value = event["value"]
                elif kind == "ended":
                    ending = self._request_ended(value, timed_out, event["status"], log)
                    return replace(ending, excess=reading.excess)
                else:
                    reading.follow(event)
                    on_event(event)
        except BaseException:
            # On Ctrl-C the child must not keep computing, and the next request must not take its end for its own.
            if pid is not None:
                _kill_group(pid)
            self._await_end()
            raise

    def _await_end(self) -> None:
        """Read the events of a request that was given up until it has ended; stop the worker if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + _GRACE_S
        while (event := self._lines.next(deadline)) is not None and event.get("event") != "timeout":
            if event.get("event") == "ended":
                if not self.forks:
                    self._stop()
                return
        _kill_group(self._process.pid)
        self._stop()

    def _request_ended(self, value: dict[str, Any] | None, timed_out: bool, status: int, log: Path) -> Ending:
        if not self.forks:
            self._stop()
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        return Ending(None if timed_out else value, timed_out, killer, code, _tail(log))

    def _worker_died(self, value: dict[str, Any] | None, timed_out: bool, log: Path) -> Ending:
        """Return the ending of a request whose worker process died."""
        assert self._process is not None
        code = self._process.wait()
        self._stop()
        killer = -code if code < 0 else None
        return Ending(
            None if timed_out else value, timed_out, killer, code if code >= 0 else None, _tail(log)
        )

    def _stop(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill_group(self._process.pid)
            self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _ensure_started(self, log: Path) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._stop()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*self._command, *(self._fork_flags if self.forks else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )
        assert self._process.stdout is not None
        self._lines.watch(self._process.stdout.fileno())
        event = self._lines.next(time.monotonic() + _START_TIMEOUT_S)
        if event is None or event.get("event") != "ready":
            _kill_group(self._process.pid)
            self._stop()
            raise WorkerError(f"the worker process did not start: {last_line(_tail(log)) or 'no message'}")
        self.forks = event["forks"]


class _Reading:
    """Holds a process to the limits on reading a model, from the event that announces it to the next."""

    def __init__(self) -> None:
        self.pid = -1
        self.excess: str | None = None
        self._limits: ReadingLimits | None = None
        self._since = 0.0

    def follow(self, event: dict[str, Any]) -> None:
        self._limits = ReadingLimits(**event["limits"]) if event.get("limits") is not None else None
        self._since = time.monotonic()

    def next_look(self, deadline: float) -> float:
        return deadline if self._limits is None else min(deadline, time.monotonic() + LOOK_EVERY_S)

    def is_excessive(self) -> bool:
        """Whether the process is beyond its limits; it is said once."""
        assert self._limits is not None
        self.excess = self._limits.excess(self.pid, time.monotonic() - self._since)
        if self.excess is not None:
            self._limits = None
        return self.excess is not None


class _Lines:
    """JSON lines from a pipe, read with a deadline. Incomplete lines of killed writers are skipped."""

    def __init__(self) -> None:
        self._fd = -1
        self._buffer = b""

    def watch(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event, {"event": "timeout"} at the deadline, or None when the pipe is closed."""
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    return event
                continue
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return {"event": "timeout"}
            chunk = os.read(self._fd, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tail(log: Path, limit: int = 64_000) -> str:
    try:
        return log.read_bytes()[-limit:].decode(errors="replace")
    except OSError:
        return ""


def last_line(text: str) -> str:
    """Return the last line that is not blank, at most 300 characters of it; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def ask(
    launcher: Launcher,
    request: AnyRequest,
    timeout_s: float,
    on_event: OnEvent = lambda _: None,
    reads: str | None = None,
) -> dict[str, Any]:
    """Return the value of a request, or raise if it failed.

    Args:
        on_event: called with each event other than the result.
        reads: the model that the request reads, for messages.

    Raises:
        Unsupported: the worker answered with an error.
        UnusableModel: the model took more time or memory to read than its size explains.
        WorkerError: the process died or took too long.
    """
    ending = launcher.run(request, timeout_s, on_event)
    kind = request.kind.replace("_", " ")
    if ending.excess is not None:
        raise UnusableModel(complaint(reads or "the model", ending.excess))
    if ending.timed_out:
        raise WorkerError(f"the worker process took longer than {timeout_s:g} s ({kind})")
    if ending.value is None:
        raise WorkerError(f"the worker process failed ({kind}): {last_line(ending.log) or ending}")
    if "error" in ending.value:
        raise Unsupported(ending.value["error"])
    return ending.value
