"""What a start says of itself: its phases, how long it has taken, and what earlier ones let expect."""

import asyncio
import ctypes
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve_worker import COMMAND
from tests.served import served
from vivace.foundation.hardware.cuda_context import open_context
from vivace.foundation.spec.sizes import Size
from vivace.serve.queue.pool import EarlyProcesses
from vivace.serve.queue.process import WorkerProcess
from vivace.serve.queue.startup import FIRST_PHASE, PastStarts, Startup, key_of
from vivace.serve.settings import ServeSettings

SETTINGS = ServeSettings("tiny-sd", "baseline", device="cpu", sizes=(Size(64, 64),))


def past(folder: Path, key: str = "a") -> PastStarts:
    return PastStarts(key, folder / "starts.json")


def test_the_first_start_says_that_nothing_is_known(tmp_path: Path) -> None:
    start = Startup(past(tmp_path), time.monotonic())
    assert start.expected_s is None
    assert start.expectation.startswith("it is the first start of this model, recipe, device and sizes")
    assert start.health()["expected_seconds"] is None


def test_what_is_expected_is_the_median_of_the_last_three(tmp_path: Path) -> None:
    for seconds in (90.0, 7.0, 9.0, 8.0):
        past(tmp_path).add(seconds, {"import": seconds})
    past(tmp_path, "another").add(40.0, {})
    assert [start.seconds for start in past(tmp_path).read()] == [7.0, 9.0, 8.0]
    start = Startup(past(tmp_path), time.monotonic() - 2)
    assert start.expectation == "about 8.0 s, as the last 3 starts took"
    assert start.health()["expected_seconds"] == 8.0
    assert start.health()["seconds"] == pytest.approx(2.0, abs=0.5)


def test_phases_add_up_and_are_kept_for_the_next_start(tmp_path: Path) -> None:
    began = time.monotonic() - 5
    start = Startup(past(tmp_path), began)
    start.enter("importing", began + 1)
    start.enter("loading", began + 3)
    words = start.finish()
    assert words.startswith(f"ready after 5.0 s: {FIRST_PHASE} 1.0, importing 2.0, loading 2.0")
    (kept,) = past(tmp_path).read()
    assert sum(kept.phases.values()) == pytest.approx(kept.seconds, abs=0.05)
    assert kept.phases["importing"] == pytest.approx(2.0)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"key": "a", "seconds": "x", "phases": {}}]', "{}"])
def test_a_file_that_is_none_of_starts_is_said_and_written_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "starts.json").write_text(content)
    past(tmp_path).add(7.0, {})
    assert [start.seconds for start in past(tmp_path).read()] == [7.0]
    assert "is not a list of starts" in caplog.text


def test_a_folder_that_cannot_be_written_harms_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    PastStarts("a", tmp_path / "file" / "starts.json").add(7.0, {})
    assert "how long this start took cannot be kept" in caplog.text


def test_other_sizes_recipes_and_models_are_other_starts() -> None:
    others = [
        {"sizes": (Size(96, 64),)},
        {"recipe": "bf16"},
        {"model": "tiny-flux"},
        {"threads": 2},
        {"batches": (2, 4)},
        {"loras": {"a": Path("a")}},
        {"task": "text"},
    ]
    keys = {key_of(dataclasses.replace(SETTINGS, **fields)) for fields in [{}, *others]}
    assert len(keys) == 1 + len(others)


def test_readyz_and_the_log_say_how_a_start_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "vivace.serve")
    settings = ServeSettings("fake", "baseline")
    for number in range(2):
        with served(settings, COMMAND, VIVACE_TEST_DIED=str(tmp_path / "died")) as server:
            (replica,) = server.pool.replicas
            answer = server.send("/readyz").json["workers"][0]
            assert "start" not in answer, "it is over"
            replica.starting = Startup(replica.past, time.monotonic() - 1)
            start = server.send("/readyz").json["workers"][0]["start"]
            replica.starting = None
        assert start["seconds"] >= 1.0
        assert start["expected_seconds"] is not None, "the server has started once"
        assert list(start["phases"]) == [FIRST_PHASE]
        assert len(json.loads((tmp_path / "serve-starts.json").read_text())) == number + 1
    assert "worker 1 starts: it is the first start" in caplog.text
    assert "as the last start took" in caplog.text
    assert "worker 1: ready after" in caplog.text


def test_a_worker_that_was_started_early_is_the_one_that_draws() -> None:
    async def take() -> None:
        early = EarlyProcesses(SETTINGS, lambda gpu: WorkerProcess(COMMAND))
        await early.start()
        (waiting,) = early._waiting.values()
        pid = waiting.pid
        process = early.take(None)
        await process.start()
        assert process.pid == pid
        assert early.take(None).pid is None, "a new one, after that one's end"
        await early.stop()
        assert process.pid == pid, "what was taken is its pool's"
        await process.stop(at_once=True)

    asyncio.run(take())


def test_early_workers_that_nobody_takes_are_ended() -> None:
    async def leave() -> WorkerProcess:
        early = EarlyProcesses(SETTINGS, lambda gpu: WorkerProcess(COMMAND))
        await early.start()
        (waiting,) = early._waiting.values()
        await early.stop()
        return waiting

    assert asyncio.run(leave()).pid is None


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
