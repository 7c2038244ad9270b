"""Long runs: memory that does not grow, clients that are killed, ten times too much. Short ones by default."""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.serve_worker import COMMAND
from tests.served import Served, form_of, served
from tests.unit.serve.test_edits import png
from vivace.foundation.spec.sizes import Size
from vivace.serve.settings import ServeSettings

LORAS = Path("tinyworld/loras")
MB = 1e6


def soak(seconds: float) -> object:
    return pytest.param(seconds, marks=[pytest.mark.soak, pytest.mark.timeout(3 * seconds + 600)])


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    is_long = any(item.get_closest_marker("soak") for item in request.session.items)
    settings = ServeSettings(
        model="tiny-sd",
        recipe="tiny_vae",
        device="cpu",
        threads=1,
        sizes=(Size(64, 64), Size(96, 64)),
        loras=LORAS,
        batch=is_long,  # each size is timed with each number of images as the server starts
    )
    with served(settings) as running:
        yield running


def fields_of(chance: random.Random) -> dict[str, object]:
    """Return a request of some size, steps, format, and perhaps with a LoRA."""
    fields: dict[str, object] = {
        "seed": chance.randrange(1000),
        "size": chance.choice(["64x64", "96x64"]),
        "num_inference_steps": chance.choice([1, 2, 3]),
        "output_format": chance.choice(["png", "jpeg", "webp"]),
        "n": chance.choice([1, 1, 1, 2]),
    }
    if chance.random() < 0.4:
        fields["loras"] = [{"name": "tiny-sd-outlines", "scale": chance.choice([0.5, 1.0])}]
    return fields


def resident(server: Served) -> tuple[float, float]:
    """Return the resident bytes of the worker and of this process, which has the server in it."""
    process = server.pool.replicas[0]._process
    assert process is not None
    return psutil.Process(process.pid).memory_info().rss, psutil.Process().memory_info().rss


def growth(points: list[tuple[int, float]]) -> float:
    """Return the bytes that 1,000 requests add, from the least of the second quarter to that of the last.

    The least, since batches of other sizes take some megabytes that the allocator gives back.
    """
    quarter = len(points) // 4
    before = min(value for _, value in points[quarter : 2 * quarter])
    after = min(value for _, value in points[-quarter:])
    return 1000 * (after - before) / (points[-quarter // 2][0] - points[quarter + quarter // 2][0])


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(40, marks=pytest.mark.long),
        pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_memory_does_not_grow(server: Served, number: int) -> None:
    chance = random.Random(5)
    sent, statuses = 0, Counter[int]()
    points: list[tuple[int, tuple[float, float]]] = []

    def request(kind: float, fields: dict[str, object]) -> int:
        if kind < 0.1:
            left = server.leave("a red circle", **{**fields, "num_inference_steps": 20})
            time.sleep(0.2 * kind)
            left.close()
            return 499
        if kind < 0.2:
            fields.pop("loras", None)
            return server.edit(files={"image": png((64, 64))}, **fields).status
        if kind < 0.3:
            return server.draw(**{**fields, "seed": -1}).status
        return server.draw(**fields).status

    expected = np.asarray(server.draw(seed=1, num_inference_steps=2).images[0])
    with ThreadPoolExecutor(4) as clients:
        while sent < number:
            requests = [(chance.random(), fields_of(chance)) for _ in range(20)]
            statuses.update(clients.map(lambda each: request(*each), requests))
            sent += len(requests)
            points.append((sent, resident(server)))
    check_nothing_is_left(server, expected)
    assert set(statuses) == {200, 400, 499}
    if len(points) < 10:
        return
    grown = {
        name: growth([(count, memory[which]) for count, memory in points])
        for which, name in enumerate(("worker", "server"))
    }
    for name, each in grown.items():
        print(f"{name}: {each / MB:+.2f} MB in 1,000 of {sent} requests; {dict(statuses)}")
    assert max(grown.values()) < MB


def check_nothing_is_left(server: Served, expected: np.ndarray) -> None:
    server.wait_for("running", 0, 60)
    server.wait_for("waiting", 0, 60)
    assert np.array_equal(np.asarray(server.draw(seed=1, num_inference_steps=2).images[0]), expected)
    assert server.pool.replicas[0].num_restarts == 0
    assert not list(server.pool._folder.path.iterdir()), "no image is left in memory"


@pytest.mark.parametrize("seconds", [1.0, soak(600.0)])
def test_clients_that_are_killed_at_random_harm_nobody(server: Served, seconds: float) -> None:
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            fields = {"num_inference_steps": chance.choice([1, 4, 12]), "stream": chance.random() < 0.5}
            client = (
                uploading(server, chance)
                if chance.random() < 0.2
                else server.leave("a blue square", **fields)
            )
            with contextlib.suppress(OSError):
                client.settimeout(chance.choice([0.001, 0.02, 0.1, 0.4]))
                client.recv(1)
            with contextlib.suppress(OSError):
                if chance.random() < 0.5:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
            client.close()
            counts["left"] += 1

    expected = np.asarray(server.draw(seed=1, num_inference_steps=2).images[0])
    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        answer = server.draw(seed=1, num_inference_steps=2)
        assert answer.status in (200, 429)
        if answer.status == 200:
            counts["right"] += 1
            difference = np.abs(np.asarray(answer.images[0]).astype(int) - expected).max()
            assert difference <= 2, "as large as in a batch"
        assert server.send("/readyz").status == 200
        server.states()
    for thread in threads:
        thread.join()
    check_nothing_is_left(server, expected)
    print(dict(counts))
    assert counts["right"] >= 1
    assert counts["left"] >= 5


def uploading(server: Served, chance: random.Random) -> socket.socket:
    """Send a part of a form, or all of it."""
    body, kind = form_of({"prompt": "x", "num_inference_steps": 12}, {"image": png((64, 64))})
    client = socket.create_connection(("127.0.0.1", server.port))
    head = ["host: localhost", f"content-type: {kind}", f"content-length: {len(body)}"]
    part = body[: chance.randrange(1, len(body) + 1)]
    client.sendall("\r\n".join(["POST /v1/images/edits HTTP/1.1", *head, "", ""]).encode() + part)
    return client


@pytest.mark.parametrize("seconds", [pytest.param(4.0, marks=pytest.mark.long), soak(300.0)])
def test_ten_times_more_than_can_be_drawn_loses_nothing(seconds: float, tmp_path: Path) -> None:
    """An image takes a fifth of a second; fifty requests come in each second."""
    settings = ServeSettings(model="fake", recipe="baseline", max_queue=8, timeout_s=20.0)
    fields = {"prompt": "slow 0.5", "num_inference_steps": 4}
    with (
        served(settings, COMMAND, VIVACE_TEST_DIED=str(tmp_path / "died")) as server,
        ThreadPoolExecutor(64) as clients,
    ):
        began = time.monotonic()
        for _ in range(10):
            assert server.draw(**fields).status == 200
        unloaded = 10 / (time.monotonic() - began)
        before, began = server.states()["done"], time.monotonic()
        answers = []
        while (now := time.monotonic()) < began + seconds:
            answers.append(clients.submit(server.draw, **fields))
            time.sleep(max(0.0, began + len(answers) / (10 * unloaded) - now))
        loaded = (server.states()["done"] - before) / (time.monotonic() - began)
        results = [answer.result() for answer in answers]
        assert {answer.status for answer in results} == {200, 429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in results if answer.status == 429)
        assert server.states()["failed"] == 0
    print(
        f"{loaded:.2f} of {unloaded:.2f} images a second are drawn at {len(answers) / seconds:.0f} requests a second"
    )
    assert loaded > (0.95 if seconds > 60 else 0.85) * unloaded
