"""Two servers with one folder of LoRAs, whose files are replaced, half written and removed while they run."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save

from tests.served import Served, served
from vivace.foundation.spec.sizes import Size
from vivace.serve.settings import ServeSettings

pytestmark = pytest.mark.long  # two servers and their workers

OUTLINES = Path("tinyworld/loras/tiny-sd-outlines.safetensors")


def stronger(factor: float) -> bytes:
    """Return a LoRA whose effect is so many times that of the embedded one."""
    return save(
        {
            name: factor * tensor if "up" in name or "lora_B" in name else tensor
            for name, tensor in load_file(OUTLINES).items()
        }
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loras")


@pytest.fixture
def folder(shared: Path) -> Path:
    """The folder of both servers, with its files as they were at first."""
    for name in ("a", "b"):
        (shared / f"{name}.safetensors").write_bytes(stronger(1.0))
    return shared


@pytest.fixture(scope="module")
def pair(shared: Path) -> Iterator[tuple[Served, Served]]:
    """The servers, of one process, with a worker each."""
    for name in ("a", "b"):
        (shared / f"{name}.safetensors").write_bytes(stronger(1.0))
    settings = ServeSettings(
        model="tiny-sd",
        recipe="tiny_vae",
        device="cpu",
        threads=1,
        sizes=(Size(64, 64),),
        loras=shared,
        task="text",
    )
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(served(settings)), stack.enter_context(served(settings))


def pixels(server: Served, **fields: Any) -> np.ndarray:
    answer = server.draw(seed=3, num_inference_steps=2, **fields)
    assert answer.status == 200, answer.body
    return np.asarray(answer.images[0])


def lora(name: str) -> dict[str, Any]:
    return {"loras": [{"name": name, "scale": 2.0}]}


def test_both_draw_with_the_file_as_it_is(pair: tuple[Served, Served], folder: Path) -> None:
    plain = [pixels(server) for server in pair]
    before = [pixels(server, **lora("a")) for server in pair]
    assert np.array_equal(*plain)
    assert np.array_equal(*before)
    new = folder / "new"
    new.write_bytes(stronger(3.0))
    os.replace(new, folder / "a.safetensors")
    replaced = [pixels(server, **lora("a")) for server in pair]
    assert np.array_equal(*replaced)
    assert not np.array_equal(replaced[0], before[0])
    content = stronger(1.0)
    with (folder / "a.safetensors").open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        for server in pair:
            answer = server.draw(**lora("a"))
            assert (answer.status, "a.safetensors is truncated" in answer.message) == (400, True)
            assert np.array_equal(pixels(server, **lora("b")), before[0]), "the other file is as it was"
        file.write(content[len(content) // 2 :])
    for server, without in zip(pair, plain, strict=True):
        assert np.array_equal(pixels(server, **lora("a")), before[0])
        assert np.array_equal(pixels(server), without)
        assert server.pool.replicas[0].num_restarts == 0


def test_a_file_that_is_added_is_drawn_with(pair: tuple[Served, Served], folder: Path) -> None:
    server, _ = pair
    assert server.draw(**lora("new")).message == "no LoRA 'new'; there are: a, b"
    (folder / "new.safetensors").write_bytes(stronger(1.0))
    with (folder / "huge.safetensors").open("wb") as file:
        header = json.dumps(
            {"x.lora_A.weight": {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]}}
        )
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2**33)
    try:
        assert server.send("/v1/models/tiny-sd").json["loras"] == ["a", "b", "huge", "new"]
        assert np.array_equal(pixels(server, **lora("new")), pixels(server, **lora("a")))
        began = time.monotonic()
        refused = server.draw(**lora("huge"))
        assert (refused.status, "it is no LoRA of this model" in refused.message) == (400, True)
        assert time.monotonic() - began < 5, "its 8 GB are not read"
    finally:
        for name in ("new", "huge"):
            (folder / f"{name}.safetensors").unlink()


def test_a_file_that_is_written_all_the_time_ends_no_worker(
    pair: tuple[Served, Served], folder: Path
) -> None:
    """It is truncated and written while the workers read it: each image is of one of the two, or refused."""
    contents = [stronger(1.0), stronger(3.0)]
    possible = []
    for content in contents:
        (folder / "a.safetensors").write_bytes(content)
        possible.append(pixels(pair[0], **lora("a")).tobytes())
    has_ended = threading.Event()

    def write() -> None:
        number = 0
        while not has_ended.is_set():
            number += 1
            (folder / "a.safetensors").write_bytes(contents[number % 2])
            time.sleep(0.02 * (number % 3))

    writing = threading.Thread(target=write)
    writing.start()
    until, statuses = time.monotonic() + 4, set()
    while time.monotonic() < until:
        for server in pair:
            answer = server.draw(seed=3, num_inference_steps=2, **lora("a"))
            statuses.add(answer.status)
            assert answer.status in (200, 400), answer.body
            assert answer.status == 400 or np.asarray(answer.images[0]).tobytes() in possible
    has_ended.set()
    writing.join()
    assert 200 in statuses
    for server in pair:
        assert pixels(server, **lora("b")).tobytes() == possible[0]
        assert server.pool.replicas[0].num_restarts == 0


def test_a_worker_that_comes_back_goes_on_without_files_that_are_gone(
    pair: tuple[Served, Served], folder: Path
) -> None:
    """The last test of the pair, whose first server has no LoRA afterwards."""
    first, second = pair
    plain, other = pixels(first), pixels(second, **lora("b"))
    (folder / "a.safetensors").unlink()
    restart(first)
    answer = first.draw(**lora("a"))
    assert (answer.status, answer.message) == (400, "no LoRA 'a'; there are: b")
    assert np.array_equal(pixels(first, **lora("b")), other)
    (folder / "b.safetensors").unlink()
    restart(first)
    assert np.array_equal(pixels(first), plain), "images without a LoRA need none"
    assert first.draw(**lora("b")).status == 400
    assert first.send("/v1/models").json["data"][0]["loras"] == []
    assert np.array_equal(pixels(second), plain)


def restart(server: Served) -> None:
    (replica,) = server.pool.replicas
    restarts, process = replica.num_restarts, replica._process
    assert process is not None
    process.kill()
    until = time.monotonic() + 60
    while not (replica.num_restarts > restarts and replica.is_able):
        assert time.monotonic() < until
        time.sleep(0.05)
