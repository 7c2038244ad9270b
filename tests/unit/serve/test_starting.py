"""What a start says of itself: its phases, how long it has taken, and what earlier ones let expect."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.served import fake
from vivace.foundation.hardware.this_machine import open_context
from vivace.foundation.spec.sizes import Size
from vivace.serve.queue.process import Workers
from vivace.serve.queue.replica import Replica
from vivace.serve.queue.startup import FIRST_PHASE, Startup, key_of, past_starts
from vivace.serve.settings import ServeSettings

SETTINGS = ServeSettings(model="tiny-sd", recipe="baseline", device="cpu", sizes=(Size(64, 64),))

BAD_FORK = """
import json, os, sys
from types import SimpleNamespace
from vivace.serve.worker import main as worker

worker._import_libraries, worker._import_model = lambda: None, lambda name: None
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: True))


def execv(file, arguments):
    os.write(1, json.dumps({"event": "new", "arguments": arguments[1:]}).encode() + b"\\n")
    os._exit(0)


os.execv = execv
worker.main()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    return tmp_path / "serve-last-starts.json"


def start_of_five_seconds(key: str = "a") -> Startup:
    began = time.monotonic() - 5
    start = Startup(key, began)
    start.enter("importing", began + 1)
    start.enter("loading", began + 3)
    return start


def test_a_start_says_what_the_last_one_of_the_same_took(cache: Path) -> None:
    first = start_of_five_seconds()
    assert first.expectation.startswith("it is the first start of this model, recipe, device and sizes")
    assert first.health()["expected_seconds"] is None
    assert first.finish().startswith(f"ready after 5.0 s: {FIRST_PHASE} 1.0, importing 2.0, loading 2.0")
    start_of_five_seconds("another").finish()
    kept = past_starts()["a"]
    assert sum(kept.phases.values()) == pytest.approx(kept.seconds, abs=0.05)
    second = Startup("a", time.monotonic() - 2)
    assert second.expectation == "about 5.0 s, as the last start took"
    assert second.health()["expected_seconds"] == 5.0
    assert second.health()["seconds"] == pytest.approx(2.0, abs=0.5)


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": {"seconds": "x", "phases": {}}}'])
def test_a_file_that_is_none_of_starts_is_said_and_written_anew(
    cache: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text(content)
    start_of_five_seconds().finish()
    assert list(past_starts()) == ["a"]
    assert "has no times of starts" in caplog.text


def test_a_folder_that_cannot_be_written_harms_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "file"))
    assert start_of_five_seconds().finish()
    assert "how long this start took cannot be kept" in caplog.text


def test_other_sizes_recipes_and_models_are_other_starts() -> None:
    others = [
        {"sizes": (Size(96, 64),)},
        {"recipe": "bf16"},
        {"model": "tiny-flux"},
        {"threads": 2},
        {"batch": True},
        {"loras": Path("tinyworld/loras")},
        {"task": "text"},
    ]
    keys = {key_of(SETTINGS.model_copy(update=fields)) for fields in [{}, *others]}
    assert len(keys) == 1 + len(others)


def test_readyz_and_the_log_say_how_a_start_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vivace.serve")
    for _ in range(2):
        with fake(tmp_path) as server:
            (replica,) = server.pool.replicas
            answer = server.send("/readyz").json["workers"][0]
            assert "start" not in answer, "it is over"
            replica.starting = Startup(replica.key, time.monotonic() - 1)
            start = server.send("/readyz").json["workers"][0]["start"]
            replica.starting = None
        assert start["seconds"] >= 1.0
        assert start["expected_seconds"] is not None, "the server has started once"
        assert list(start["phases"]) == [FIRST_PHASE]
        assert len(past_starts()) == 1
    assert "worker 1 starts: it is the first start" in caplog.text
    assert "as the last start took" in caplog.text
    assert "worker 1: ready after" in caplog.text


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere each worker imports libraries itself"
)
def test_one_template_forks_all_workers_and_they_outlive_it(tmp_path: Path) -> None:
    with fake(tmp_path, device="cpu", gpus=("0", "1")) as server:
        replicas = server.pool.replicas

        def parents() -> set[int]:
            until = time.monotonic() + 20
            while not all(replica.is_able for replica in replicas):
                assert time.monotonic() < until, [replica.doing for replica in replicas]
                time.sleep(0.02)
            return {psutil.Process(pid_of(replica)).ppid() for replica in replicas}

        def pid_of(replica: Replica) -> int:
            assert replica._process is not None
            assert replica._process.pid is not None
            return replica._process.pid

        def kill_first() -> None:
            restarts = replicas[0].num_restarts
            os.kill(pid_of(replicas[0]), signal.SIGKILL)
            while replicas[0].num_restarts == restarts:
                time.sleep(0.02)

        (template,) = parents()
        kill_first()
        assert "SIGKILL" in replicas[0].doing
        assert parents() == {template}
        process = psutil.Process(template)  # before it ends: afterwards there is none
        process.kill()
        process.wait()
        assert server.draw(seed=7).images[0].getpixel((0, 0)) == (7, 0, 0)
        assert [replica.num_restarts for replica in replicas] == [1, 0], "they go on without it"
        kill_first()
        assert not parents() & {template}
        pids = [pid_of(replica) for replica in replicas]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_template_with_a_gpu_in_use_lets_each_worker_import_libraries_itself() -> None:
    """What CUDA did before a fork, the child cannot repeat: it is a process of its own instead."""
    command = (sys.executable, "-c", BAD_FORK)

    async def start() -> dict[str, Any] | None:
        workers = Workers(SETTINGS, command)
        process = workers.make(None)
        await process.start()
        event = await process.event()
        await process.stop(at_once=True)
        await workers.stop()
        return event

    if sys.platform.startswith("linux"):
        assert asyncio.run(start()) == {"event": "new", "arguments": ["-m", "vivace.serve.worker.main"]}


class Driver:
    """Stands in for the driver's library: every function answers 0 until one fails."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(name == self._failing)

        return call


def test_a_context_is_created_where_there_is_a_driver() -> None:
    driver = Driver()
    assert open_context(lambda name: driver)
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    broken = Driver("cuInit")
    assert not open_context(lambda name: broken)
    assert broken.calls == ["cuInit"], "nothing is asked of a driver that does not work"


def test_without_a_driver_no_context_is_created() -> None:
    def load(name: str) -> Any:
        return ctypes.CDLL("libno-such-driver.so.1")

    assert not open_context(load)
