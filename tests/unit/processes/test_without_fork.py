"""With VIVACE_NO_FORK=1 no process is forked and no POSIX call is made, as on Windows."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.resident_worker import COMMAND
from vivace.benchmark.rounds.worker_requests import EnvironmentRequest
from vivace.foundation.processes.launcher import Launcher, kill_group, start, wait_for_an_end
from vivace.foundation.processes.protocol import EventReader
from vivace.foundation.processes.system import NO_FORK, can_fork, is_posix, limitations, peak_resident_bytes


@pytest.fixture(autouse=True)
def _without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_FORK, "1")
    for name in ("fork", "killpg", "setpgid"):
        monkeypatch.delattr(os, name, raising=False)


@pytest.mark.parametrize("value", ["", "0"])
def test_only_a_variable_that_is_set_counts(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_fork()
    assert "VIVACE_NO_FORK is set" in limitations()[0]
    monkeypatch.setenv(NO_FORK, value)
    assert is_posix() is (os.name == "posix")
    assert not any(NO_FORK in line for line in limitations())


@pytest.mark.timeout(60)
def test_each_request_has_a_fresh_process() -> None:
    with Launcher(COMMAND) as launcher:
        first, second = (launcher.run(EnvironmentRequest(device="cpu"), 30.0) for _ in range(2))
        assert not launcher.forks
        assert first.value is not None
        assert second.value is not None
        assert first.value["pid"] != second.value["pid"]


@pytest.mark.timeout(60)
def test_a_request_that_dies_or_hangs_ends_alone() -> None:
    with Launcher(COMMAND) as launcher:
        died = launcher.run(EnvironmentRequest(device="dies"), 30.0)
        assert died.value is None
        assert not died.timed_out
        assert died.ended_by == "SIGABRT" or os.name != "posix"  # Windows has exit codes alone
        assert launcher.run(EnvironmentRequest(device="hangs"), 1.0).timed_out
        assert launcher.run(EnvironmentRequest(device="cpu"), 30.0).value is not None


def test_events_are_read_with_a_deadline() -> None:
    reading, writing = os.pipe()
    events = EventReader()
    events.watch(reading)
    os.close(reading)
    assert events.next(time.monotonic() + 0.05) == {"event": "timeout"}
    os.write(writing, b'{"event": "ended"}\n{"event"')
    assert events.next(time.monotonic() + 5) == {"event": "ended"}
    os.close(writing)
    for _ in range(2):
        assert events.next(time.monotonic() + 5) is None


def test_without_fork_a_process_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; sleeps = [sys.executable, '-c', 'import time; time.sleep(60)']; "
        "print(subprocess.Popen(sleeps).pid, flush=True); sys.stdin.read()"
    )
    with (tmp_path / "errors").open("wb") as errors:
        process = start([sys.executable, "-c", code], {}, errors)
    assert process.stdout is not None
    assert process.stdin is not None
    grandchild = psutil.Process(int(process.stdout.readline()))
    kill_group(process.pid)
    wait_for_an_end([process])
    assert process.wait() != 0
    grandchild.wait(timeout=5)
    process.stdin.close()
    process.stdout.close()
    kill_group(process.pid)  # no error


@pytest.mark.timeout(60)
def test_a_worker_ends_with_the_process_that_started_it() -> None:
    code = (
        "import subprocess, sys; from tests.resident_worker import COMMAND; "
        "worker = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE); "
        "worker.stdout.readline(); "
        'worker.stdin.write(b\'{"device": "hangs"}\\n\'); worker.stdin.flush(); worker.stdout.readline(); '
        "print(worker.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        parent.kill()
    worker.wait(timeout=10)


def test_the_peak_of_memory_is_not_what_is_held_now() -> None:
    held = bytearray(os.urandom(1) * 200_000_000)
    del held
    assert peak_resident_bytes() > psutil.Process().memory_info().rss + 50_000_000
