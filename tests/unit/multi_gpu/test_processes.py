"""Whatever ends one of the processes that shard a denoiser ends the others, and is reported."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import families
from tests.forked_peers import forked_peers, lives, pids
from vivace.errors import WorkerError

RECIPE = "parallel(cfg)"


def ends(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)


@pytest.fixture
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.mark.usefixtures("_forked")
@pytest.mark.long
def test_a_killed_process_is_told_at_once_and_the_others_end() -> None:
    sharded = families.session("sd", "parallel(cfg, gpus=3)")
    first, second = pids(sharded)
    families.draw(sharded)
    threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
    start = time.monotonic()
    killed = rf"\(pid {first}\) that computed on shard 1 of 3 was killed \(SIGKILL\)"
    with pytest.raises(WorkerError, match=killed):
        families.draw(sharded, num_inference_steps=1000)
    assert time.monotonic() - start < 10
    assert ends(second), "it would wait for ever"
    with pytest.raises(WorkerError, match="load the model anew"):
        families.draw(sharded)
    sharded.close()
    with families.session("sd", RECIPE) as again:
        assert np.isfinite(families.draw(again)).all()


@pytest.mark.usefixtures("_forked")
def test_what_fails_in_a_peer_is_told_here() -> None:
    with families.session("sd", RECIPE) as sharded:
        forward = sharded.pipe.unet.forward
        # A size that a UNet's halvings and doublings do not meet again.
        with pytest.raises(WorkerError, match=r"ended \(1\): RuntimeError: mat1 and mat2"):
            forward(torch.zeros(2, 4, 9, 9), 1, encoder_hidden_states=torch.zeros(2, 77, 3))


@pytest.mark.usefixtures("_forked")
def test_a_forgotten_session_leaves_nothing_running() -> None:
    sharded = families.session("sd", RECIPE)
    started = pids(sharded)
    del sharded
    gc.collect()
    assert all(ends(pid) for pid in started)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("_forked")
def test_a_forgotten_session_is_not_in_the_next_ones_way() -> None:
    """A notebook's cell, run again: pipelines refer to themselves, and nothing has collected the first yet."""
    gc.disable()
    try:
        first = pids(families.session("sd", RECIPE))
        with families.session("sd", RECIPE) as second:
            assert all(ends(pid) for pid in first)
            families.draw(second)
    finally:
        gc.enable()


# Whole processes, whose peers are started as a user's are.

_DRAWS_UNTIL_KILLED = """
import vivace
vivace.load("tiny-sd", "parallel(cfg)")("a red circle", num_inference_steps=1000)
"""


def _of_session(leader: int) -> dict[int, str]:
    """The command lines of the processes of a session; zombies have none."""
    by_pid = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which is in brackets: state, parent, group, session.
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
            if int(session) == leader and (line := (folder / "cmdline").read_text().replace("\0", " ")):
                by_pid[int(folder.name)] = line
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return by_pid


def _start(command: list[str]) -> Any:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Whatever runs the tests in the background ignores Ctrl-C, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A process that draws with a peer until it is ended: a script, or `vivace generate` (by parameter)."""
    command = [sys.executable, "-c", _DRAWS_UNTIL_KILLED]
    if getattr(request, "param", "script") == "generate":
        command = [sys.executable, "-m", "vivace", "generate", "a red circle", "--model", "tiny-sd"]
        command += ["--recipe", "parallel(cfg)+steps(1000)", "--num-images", "50", "--out", str(tmp_path)]
    process = _start(command)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _with_peer(process: Any) -> list[int]:
    """The processes of its session, once the peer computes."""
    deadline = time.monotonic() + 120
    while not any("runtime.peer" in line for line in _of_session(process.pid).values()):
        assert time.monotonic() < deadline, "the peer never started"
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    return list(_of_session(process.pid))


@pytest.mark.long
def test_nothing_outlives_the_primary_process(started: Any) -> None:
    peers = _with_peer(started)
    assert len(peers) == 2
    started.kill()
    started.wait()
    assert all(ends(pid) for pid in peers)


@pytest.mark.parametrize("started", ["generate"], indirect=True)
@pytest.mark.parametrize("to_all", [True, False], ids=["as a terminal does", "to the first process alone"])
@pytest.mark.long
@pytest.mark.exhaustive("*to the first process alone*")
def test_generate_interrupted_leaves_no_process_and_no_traceback(started: Any, to_all: bool) -> None:
    _with_peer(started)
    (os.killpg if to_all else os.kill)(started.pid, signal.SIGINT)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in output
    assert _of_session(started.pid) == {}
