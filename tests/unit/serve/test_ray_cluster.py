"""The server on a Ray cluster of two CPU nodes: one is lost, a worker hangs, and the server is told to end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve_worker import COMMAND
from tests.served import Served, served_by
from tests.unit.serve.test_edits import blue, png
from vivace.errors import Unsupported
from vivace.serve.queue import ray_workers, replica
from vivace.serve.queue.ray_workers import RayWorkers
from vivace.serve.settings import ServeSettings

ROOT = Path(__file__).parents[3]
IMAGES = 16


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A head without CPUs, and two nodes of one CPU."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("VIVACE_TEST_DIED", str(tmp_path / "died"))
    import ray
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80_000_000}
    quickly = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quickly, **small},
    )
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, **small)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def settings_of(cluster: Any, replicas: tuple[int, int]) -> ServeSettings:
    return ServeSettings(
        model="fake",
        recipe="baseline",
        device="cpu",
        timeout_s=60.0,
        ray_address=cluster.address,
        replicas=replicas,
    )


def wait_until(check: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def draw(server: Served, seed: int, prompt: str = "slow 1") -> tuple[int, int]:
    """Ask for an image that takes half a second; return its status and the seed that its colour shows."""
    answer = server.draw(prompt, seed=seed, num_inference_steps=5)
    return answer.status, answer.images[0].getpixel((0, 0))[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_is_lost_under_load_and_no_image_is(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of(cluster, (2, 2))
    with served_by(settings, RayWorkers(settings, COMMAND)) as server:
        phases = lambda: [each.phase.value for each in server.pool.replicas]  # noqa: E731
        wait_until(lambda: phases() == ["ready", "ready"], 60, "Ray did not use both nodes")
        assert blue(server.edit(files={"image": png()})) == 7, "source images reach the worker"
        with ThreadPoolExecutor(IMAGES) as clients:
            drawing = [clients.submit(draw, server, seed) for seed in range(1, IMAGES + 1)]
            wait_until(lambda: server.states()["done"] >= 4, 60, "nothing is drawn")
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            answers = [each.result() for each in drawing]
        assert answers == [(200, seed) for seed in range(1, IMAGES + 1)], "each client has its own image"
        assert server.states()["done"] == IMAGES + 1, "delivered once"
        with server.leave("slow 5", num_inference_steps=40):
            server.wait_for("running", 1)
        server.wait_for("cancelled", 1)
        assert b"partial_image" in server.draw("x", stream=True, partial_images=1).body
        monkeypatch.setattr(replica, "_LEAST_SILENCE_S", 1.5)
        assert draw(server, 9, "hang") == (200, 9), "a hung worker is ended, and its image drawn again"
        assert (tmp_path / "died").exists()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_spare_replica_draws_only_while_many_images_wait(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_BUSY_S", 0.2)
    monkeypatch.setattr(replica, "_SPARE_IDLE_S", 2.0)
    settings = settings_of(cluster, (1, 2))
    with served_by(settings, RayWorkers(settings, COMMAND)) as server:
        _, spare = server.pool.replicas
        assert spare.phase.value == "unloaded"
        with ThreadPoolExecutor(IMAGES) as clients:
            drawing = [clients.submit(draw, server, seed, "slow 5") for seed in range(1, IMAGES + 1)]
            wait_until(lambda: spare.phase.value == "drawing", 60, "it does not help")
            assert [each.result() for each in drawing] == [(200, seed) for seed in range(1, IMAGES + 1)]
        wait_until(lambda: spare.phase.value == "unloaded", 20, "it stays")
        assert server.send("/readyz").status == 200


@pytest.mark.long
def test_sigterm_lets_accepted_images_end(cluster: Any) -> None:
    options = ["--ray", cluster.address, "--replicas", "1", "--device", "cpu", "--port", "0"]
    command = [sys.executable, "-m", "vivace", "serve", "tiny-sd", "--recipe", "baseline", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        place = next(
            found for line in process.stderr if (found := re.match(r"http://127.0.0.1:(\d+)/ ", line))
        )
        server = Served(int(place[1]), None)
        wait_until(lambda: server.send("/readyz").status == 200, 120, "the server is not ready")
        with ThreadPoolExecutor(3) as clients:
            drawing = [clients.submit(server.draw, seed=seed, num_inference_steps=40) for seed in (1, 2, 3)]
            server.wait_for("waiting", 2)
            process.send_signal(signal.SIGTERM)
            answers = [each.result() for each in drawing]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert process.wait(60) == 0


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match="--ray needs Ray: pip install ray on every node"):
        RayWorkers(ServeSettings(model="fake", ray_address="auto"))


def test_a_cluster_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="nothing answers there"):
        ray_workers._connected("127.0.0.1:1")
