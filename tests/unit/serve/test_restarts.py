"""Workers that hang while they load, and what /readyz says while one comes back."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served, fake
from vivace.serve.queue import replica, startup
from vivace.serve.queue.startup import Startup


def wait_until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def health(server: Served) -> tuple[int, str, str]:
    answer = server.send("/readyz")
    return answer.status, answer.json["status"], answer.json["state"]


def test_a_worker_that_hangs_while_it_draws_is_ended_and_its_image_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_LEAST_SILENCE_S", 1.5)
    with fake(tmp_path) as server:
        with ThreadPoolExecutor(1) as clients:
            drawing = clients.submit(server.draw, "hang", seed=5)
            wait_until(lambda: server.pool.replicas[0].phase.value == "silent")
            assert health(server) == (503, "not ready", "failing")
            (worker,) = server.send("/readyz").json["workers"]
            assert "no sign of life for 1 s" in worker["doing"]
            assert drawing.result().images[0].getpixel((0, 0)) == (5, 0, 0)
        assert server.pool.replicas[0].num_restarts == 1
        assert health(server) == (200, "ready", "idle")


def test_what_takes_long_for_the_first_time_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of image that was not drawn yet, and one that says that it compiles."""
    monkeypatch.setattr(replica, "_LEAST_SILENCE_S", 0.2)
    with fake(tmp_path) as server:
        slow = {"num_inference_steps": 1, "seed": 5}
        assert server.draw("slow 5", negative_prompt="x", **slow).status == 200
        assert server.draw("compile slow 5", **slow).status == 200
        assert server.pool.replicas[0].num_restarts == 0


def test_a_phase_may_take_ten_times_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    began = time.monotonic() - 300
    last = Startup("a", began)
    last.enter("importing", began + 1)
    last.enter("warming 64x64", began + 100)
    last.finish()
    began = time.monotonic() - 600
    start = Startup("a", began)
    start.enter("downloading", began)
    assert start.limit_s == 3600, "no start had it yet"
    start.enter("importing", began)
    assert start.limit_s == 990
    start.enter("starting a process", began)
    assert start.limit_s == 900, "the floor"
    start.enter("warming 64x64", began + 100)
    assert start.limit_s == pytest.approx(2000, abs=5)
    assert start.left_s == pytest.approx(1500, abs=10)
    assert start.health()["phase_limit_seconds"] == pytest.approx(2000, abs=5)
    assert "warming 64x64 took more than 2000 s" in start.complaint


@pytest.mark.quick("warming*")
@pytest.mark.parametrize("phase", ["loading fake", "warming 16x16"])
def test_a_worker_that_hangs_while_it_loads_is_killed_and_started_again(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "_FIRST_S", 3.0)
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    monkeypatch.setenv("VIVACE_TEST_HANGS", phase)
    with fake(tmp_path) as server:
        assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
        assert server.pool.replicas[0].num_restarts == 1
    assert f"it hung: {phase} took more than 3 s" in caplog.text


def test_readyz_is_ready_while_a_worker_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are accepted meanwhile, and wait for it."""
    marker = tmp_path / "died"
    monkeypatch.setenv("VIVACE_TEST_UNUSABLE", "1")
    with fake(tmp_path, idle_unload_s=0.3) as server, ThreadPoolExecutor(1) as clients:
        (replica,) = server.pool.replicas
        wait_until(lambda: replica.phase == "unloaded")
        assert health(server) == (200, "ready", "unloaded")
        drawing = clients.submit(server.draw, "hold image", seed=3)
        wait_until(lambda: replica.phase != "unloaded")  # a fork is there sooner than one can look
        assert health(server) in [(200, "ready", state) for state in ("reloading", "idle", "drawing")]
        wait_until(lambda: replica.phase == "drawing")
        assert health(server) == (200, "ready", "drawing")
        marker.touch()
        (tmp_path / "image").touch()
        assert drawing.result().images[0].getpixel((0, 0)) == (3, 0, 0)
        wait_until(lambda: replica.phase == "unloaded")
        waiting = clients.submit(server.draw, seed=4)
        wait_until(lambda: replica.failed_starts > 0)
        assert health(server) == (503, "not ready", "failing")
        wait_until(lambda: replica.phase == "waiting to restart")
        doing = server.send("/readyz").json["workers"][0]["doing"]
        assert doing.endswith("it cannot load the model again: the weights are gone")
        marker.unlink()
        assert waiting.result().images[0].getpixel((0, 0)) == (4, 0, 0), "what was accepted is drawn"
        assert server.send("/readyz").status == 200


def test_a_death_that_the_next_start_mends_leaves_the_server_ready(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        (replica,) = server.pool.replicas
        assert health(server) == (200, "ready", "idle")
        process: Any = replica._process
        process.kill()
        wait_until(lambda: replica.phase == "waiting to restart")
        assert health(server) == (200, "ready", "reloading")
        up = server.send("/metrics").body.decode()
        assert 'vivace_worker_up{worker="1"} 0.0' in up, "metrics tell that no worker draws now"
        wait_until(lambda: replica.phase == "ready")
        assert health(server) == (200, "ready", "idle")


def test_one_of_two_workers_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vivace.serve")
    monkeypatch.setenv("VIVACE_TEST_UNUSABLE", "second")
    with fake(tmp_path, gpus=("0", "1")) as server:
        wait_until(lambda: {"unusable", "ready"} == {each.phase.value for each in server.pool.replicas})
        assert health(server) == (200, "ready", "idle")
        assert "it will never draw: the weights are gone" in json.dumps(server.send("/readyz").json)
        assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert "cannot be used: the weights are gone" in caplog.text
