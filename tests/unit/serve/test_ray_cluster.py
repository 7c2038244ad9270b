"""The server on a Ray cluster of two CPU nodes: one is lost, and the server is told to end, while images are drawn."""

import contextlib
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
from vivace.serve.settings import ServeSettings

ROOT = Path(__file__).parents[3]
IMAGES = 24


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without CPUs, and two nodes of one CPU."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path, os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve
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
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        started.shutdown()


def running() -> int:
    from ray import serve

    drawers = serve.status().applications["vivace"].deployments["Drawer"]
    return int(drawers.replica_states.get("RUNNING", 0))


def wait_until(check: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def draw(server: Served, seed: int) -> tuple[int, int]:
    """Ask for an image that takes half a second; return its status and the seed that its colour shows."""
    answer = server.draw("slow 1", seed=seed, num_inference_steps=5)
    return answer.status, answer.images[0].getpixel((0, 0))[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_is_lost_under_load_and_no_image_is(cluster: Any) -> None:
    from ray import serve
    from vivace.serve.queue.ray_application import NAME, Replicas, application, connect, pool_maker

    connect(cluster.address)
    settings, two = ServeSettings(model="fake", recipe="baseline"), Replicas(2, 2)
    serve.run(application(settings, two, 0, COMMAND), name=NAME, route_prefix=None)
    with served_by(settings, pool_maker(two)) as server:
        wait_until(lambda: running() == 2, 60, "Ray did not use both nodes, which have a CPU each")
        with ThreadPoolExecutor(IMAGES) as clients:
            drawing = [clients.submit(draw, server, seed) for seed in range(1, IMAGES + 1)]
            wait_until(lambda: server.states()["done"] >= 4, 60, "nothing is drawn")
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            answers = [each.result() for each in drawing]
        assert answers == [(200, seed) for seed in range(1, IMAGES + 1)], (
            "each client has its own image, once"
        )
        assert server.states()["done"] == IMAGES
        assert f"vivace_steps_count {IMAGES}.0" in server.send("/metrics").body.decode(), "delivered once"
        with server.leave("slow 5", num_inference_steps=40):
            server.wait_for("running", 1)
        server.wait_for("cancelled", 1)
        began = time.monotonic()
        assert draw(server, 7) == (200, 7)
        assert time.monotonic() - began < 10, "the 20 s of the image that nobody waits for have ended"


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
