"""The server on a Ray cluster of two CPU nodes, of which one is lost while many images are drawn."""

import contextlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve_worker import COMMAND
from tests.served import image_of
from vivace.serve.settings import ServeSettings

ROOT = Path(__file__).parents[3]
PORT = 8797
URL = f"http://127.0.0.1:{PORT}"
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


def get(path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(URL + path, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def draw(seed: int) -> tuple[int, int]:
    """Ask for an image that takes half a second; return its status and the seed that its colour shows."""
    body = {"prompt": "slow 1", "seed": seed, "num_inference_steps": 5}
    request = urllib.request.Request(
        f"{URL}/v1/images/generations", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        data = json.load(answer)["data"]
    assert len(data) == 1
    return answer.status, image_of(data[0]["b64_json"]).getpixel((0, 0))[0]


def leave(prompt: str, steps: int) -> None:
    """Ask for an image, and go away while it is drawn."""
    body = json.dumps({"prompt": prompt, "num_inference_steps": steps}).encode()
    with socket.create_connection(("127.0.0.1", PORT)) as client:
        head = ["host: localhost", "content-type: application/json", f"content-length: {len(body)}"]
        client.sendall("\r\n".join(["POST /v1/images/generations HTTP/1.1", *head, "", ""]).encode() + body)
        wait_until(lambda: counts()['vivace_images{state="running"}'] == 1, 20, "it is not drawn")


def counts() -> dict[str, float]:
    lines = get("/metrics")[1].splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def running() -> int:
    from ray import serve

    drawers = serve.status().applications["vivace"].deployments["Drawer"]
    return int(drawers.replica_states.get("RUNNING", 0))


def wait_until(check: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_is_lost_under_load_and_no_image_is(cluster: Any) -> None:
    from ray import serve

    from vivace.serve.ray_application import NAME, Replicas, application, connect

    connect(cluster.address, "127.0.0.1", PORT)
    serve.run(application(ServeSettings("fake", "baseline"), Replicas(2, 2), 0, COMMAND), name=NAME)
    wait_until(lambda: get("/readyz")[0] == 200, 60, "the server is not ready")
    wait_until(lambda: running() == 2, 60, "Ray did not use both nodes, which have a CPU each")
    with ThreadPoolExecutor(IMAGES) as clients:
        drawing = [clients.submit(draw, seed) for seed in range(1, IMAGES + 1)]
        wait_until(lambda: counts()['vivace_images{state="done"}'] >= 4, 60, "nothing is drawn")
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        answers = [each.result() for each in drawing]
    assert answers == [(200, seed) for seed in range(1, IMAGES + 1)], "each client has its own image, once"
    after = counts()
    assert after["vivace_images_accepted_total"] == after['vivace_images{state="done"}'] == IMAGES
    assert after["vivace_steps_count"] == IMAGES, "each image is delivered once"
    leave("slow 5", 40)
    wait_until(lambda: counts()['vivace_images{state="cancelled"}'] == 1, 20, "the image goes on")
    began = time.monotonic()
    assert draw(7) == (200, 7)
    assert time.monotonic() - began < 10, "the 20 s of the image that nobody waits for have ended"
