"""A process starts, is spoken to, and leaves nothing behind."""

import io
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from vivace.foundation.processes.launcher import ProcessLimits, ended_by, kill_group, start, wait_or_kill
from vivace.foundation.processes.protocol import EventReader, parse_event, send_event
from vivace.foundation.processes.resident import fork_child, status_of_child


def test_events_survive_the_incomplete_line_of_a_killed_writer() -> None:
    reading, writing = os.pipe()
    events = EventReader()
    events.watch(reading)
    os.write(writing, b'{"event": "sam\n\n[1]\n{"event": "ended", "status": -9}\n{"event"')
    assert events.next(time.monotonic() + 5) == {"event": "ended", "status": -9}
    assert events.next(time.monotonic() + 0.05) == {"event": "timeout"}
    os.close(writing)
    assert events.next(time.monotonic() + 5) is None
    os.close(reading)


def test_an_event_is_a_line() -> None:
    stream = io.StringIO()
    send_event(stream, {"event": "phase", "phase": "two\nlines"})
    assert stream.getvalue().count("\n") == 1
    assert parse_event(stream.getvalue()) == {"event": "phase", "phase": "two\nlines"}


def test_a_process_is_killed_with_those_that_it_started(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; sleeping = subprocess.Popen(['sleep', '60']);"
        "print(sleeping.pid, os.environ['NAME'], flush=True); sys.stdin.read()"
    )
    with (tmp_path / "errors").open("wb") as errors:
        process = start([sys.executable, "-c", code], {"NAME": "value"}, errors)
    assert process.stdout is not None
    assert process.stdin is not None
    pid, value = process.stdout.readline().split()
    assert value == b"value"
    grandchild = psutil.Process(int(pid))
    kill_group(process.pid)
    assert ended_by(process.wait()) == "SIGKILL"
    grandchild.wait(timeout=5)
    process.stdin.close()
    process.stdout.close()
    kill_group(process.pid)  # no error


@pytest.mark.parametrize(("code", "signal"), [("", None), ("import time; time.sleep(60)", "SIGKILL")])
def test_a_process_has_time_to_end(code: str, signal: str | None, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        process = start([sys.executable, "-c", code], {}, errors)
    assert ended_by(wait_or_kill(process, 10.0 if signal is None else 0.1)) == signal
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _fails() -> int:
    raise ValueError("not printed")


@pytest.mark.parametrize(
    ("work", "status"),
    [(lambda: 3, 3), (_fails, 1), (lambda: os.kill(os.getpid(), 9) or 0, -9)],
    ids=["ends", "raises", "is killed"],
)
def test_a_forked_child_ends_with_its_status(work, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert status_of_child(fork_child(work)) == status
    assert capfd.readouterr() == ("", "")


def test_limits_name_what_was_exceeded() -> None:
    assert ProcessLimits(1.0, 1e15).excess(os.getpid(), 0.5) is None
    assert ProcessLimits(1.0, 1e15).excess(os.getpid(), 1.5) == "1 s"
    assert ProcessLimits(1.0, 1e5).excess(os.getpid(), 0.5) == "0.0 GB of memory"


def test_pipes_are_utf8_whatever_the_terminal_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    with (tmp_path / "errors").open("wb") as errors:
        process = start([sys.executable, "-c", "print(input()[::-1])"], {}, errors)
    answer, _ = process.communicate("é → 日\n".encode())
    assert answer.decode().strip() == "日 → é"
