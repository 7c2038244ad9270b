"""What a worker has at once: the next job before the last one is back, and several images by one call."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.served import Served, fake
from tests.unit.serve.test_edits import blue, png


@pytest.fixture
def batching(tmp_path: Path) -> Iterator[Served]:
    """Its images have as their green how many others were drawn by the same call."""
    for name in ("a", "unfit"):
        (tmp_path / f"{name}.safetensors").touch()
    with fake(tmp_path, batch=True, loras=tmp_path) as running:
        yield running


def wait_for_messages(server: Served, number: int) -> None:
    until = time.monotonic() + 10
    while len(server.pool.replicas[0]._sent) != number:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_next_image_is_sent_while_one_is_drawn(server: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as clients:
        slow = clients.submit(server.draw, "hold first", seed=1)
        server.wait_for("running", 1)
        later = [clients.submit(server.draw, seed=seed) for seed in (2, 3)]
        wait_for_messages(server, 2)
        server.wait_for("waiting", 2)
        assert server.states()["running"] == 1, "what waits at the worker is not drawn yet"
        (tmp_path / "first").touch()
        answers = [each.result() for each in (slow, *later)]
    assert [answer.images[0].getpixel((0, 0))[0] for answer in answers] == [1, 2, 3]


def test_a_long_image_keeps_the_place_after_it_free_until_its_end(server: Served, tmp_path: Path) -> None:
    size = {"size": "64x64"}  # a second for each step, as its worker says
    with ThreadPoolExecutor(3) as clients:
        long = clients.submit(server.draw, "hold long", num_inference_steps=8, **size)
        server.wait_for("running", 1)
        other = clients.submit(server.draw, "hold other", **size)
        server.wait_for("waiting", 1)
        short = clients.submit(server.draw, seed=2)
        server.wait_for("waiting", 2)
        (tmp_path / "long").touch()
        assert short.result().status == 200, "it came later and went first: the other one is held"
        assert long.result().status == 200
        (tmp_path / "other").touch()
        assert other.result().status == 200


def test_a_death_counts_against_the_image_that_was_drawn(server: Served, tmp_path: Path) -> None:
    process = server.pool.replicas[0]._process
    assert process is not None
    assert process.pid is not None
    with ThreadPoolExecutor(2) as clients:
        slow = clients.submit(server.draw, "hold first", seed=1)
        server.wait_for("running", 1)
        next_ = clients.submit(server.draw, seed=2)
        wait_for_messages(server, 2)
        drawn, waits = (sent.jobs[0] for sent in server.pool.replicas[0]._sent)
        os.kill(process.pid, signal.SIGKILL)
        (tmp_path / "first").touch()
        assert slow.result().images[0].getpixel((0, 0)) == (1, 0, 0)
        assert next_.result().images[0].getpixel((0, 0)) == (2, 0, 0)
    assert (drawn.attempts, waits.attempts) == (1, 0)


def test_a_death_counts_against_all_that_was_begun_and_each_is_drawn_again_alone(
    server: Served, tmp_path: Path
) -> None:
    replica = server.pool.replicas[0]
    process = replica._process
    assert process is not None
    assert process.pid is not None
    with ThreadPoolExecutor(3) as clients:
        ends = clients.submit(server.draw, "keep ends", num_inference_steps=1, seed=1)
        server.wait_for("running", 1)
        drawn = clients.submit(server.draw, "hold drawn", seed=2)
        server.wait_for("running", 2)
        waits = clients.submit(server.draw, seed=3)
        server.wait_for("waiting", 1)
        jobs = [sent.jobs[0] for sent in replica._sent]
        os.kill(process.pid, signal.SIGKILL)
        for file in ("ends", "drawn"):
            until = time.monotonic() + 20
            while not any(
                sent.jobs[0].attempts and sent.jobs[0].prompt.endswith(file) for sent in replica._sent
            ):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert len(replica._sent) == 1, "whose the next death would be is certain"
            (tmp_path / file).touch()
        answers = [each.result() for each in (ends, drawn, waits)]
    assert [answer.images[0].getpixel((0, 0))[0] for answer in answers] == [1, 2, 3]
    assert [job.attempts for job in jobs] == [1, 1]


def test_an_image_that_is_cancelled_at_its_worker_is_not_drawn(server: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as clients:
        slow = clients.submit(server.draw, "hold first")
        server.wait_for("running", 1)
        left = server.leave("hold nothing")
        wait_for_messages(server, 2)
        left.close()
        server.wait_for("cancelled", 1)
        (tmp_path / "first").touch()
        assert slow.result().status == 200
        assert server.draw(seed=4).images[0].getpixel((0, 0)) == (4, 0, 0), (
            "the one that left would hold it up"
        )


def test_an_image_that_cannot_be_sent_or_read_fails_alone(server: Served, tmp_path: Path) -> None:
    folder = server.pool._folder.path
    with ThreadPoolExecutor(1) as clients:
        slow = clients.submit(server.draw, "hold first")
        server.wait_for("running", 1)
        moved = folder.rename(folder.with_name(f"{folder.name}-moved"))
        (tmp_path / "first").touch()
        lost = slow.result()
        refused = server.edit(files={"image": png()})
        moved.rename(folder)
    assert (lost.status, refused.status) == (500, 500)
    assert refused.message == "the image cannot be sent to the worker: No such file or directory"
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert blue(server.edit(files={"image": png()})) == 7


def test_replicas_share_the_line_and_one_may_die(tmp_path: Path) -> None:
    with (
        fake(tmp_path, gpus=("0", "1")) as two,
        ThreadPoolExecutor(8) as clients,
    ):
        until = time.monotonic() + 30
        while not all(replica.is_able for replica in two.pool.replicas):
            assert time.monotonic() < until
            time.sleep(0.02)
        pair = [clients.submit(two.draw, "hold pair", seed=seed) for seed in (1, 2)]
        two.wait_for("running", 2)
        later = [clients.submit(two.draw, "slow 1", seed=seed) for seed in range(3, 9)]
        two.wait_for("waiting", 6)
        process = two.pool.replicas[0]._process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        (tmp_path / "pair").touch()
        answers = [each.result() for each in (*pair, *later)]
        assert [answer.images[0].getpixel((0, 0))[0] for answer in answers] == list(range(1, 9))
        assert two.states() == {"waiting": 0, "running": 0, "done": 8, "failed": 0, "cancelled": 0}


def test_images_that_go_together_are_drawn_together(batching: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as clients:
        slow = clients.submit(batching.draw, "hold first")
        batching.wait_for("running", 1)
        alike = [clients.submit(batching.draw, seed=seed) for seed in (10, 11)]
        four = clients.submit(batching.draw, seed=20, n=4, num_inference_steps=3)
        with_lora = clients.submit(batching.draw, seed=30, loras=[{"name": "a"}])
        batching.wait_for("waiting", 7)
        (tmp_path / "first").touch()
        assert slow.result().status == 200
        pairs = [each.result().images[0].getpixel((0, 0)) for each in alike]
        assert pairs in ([(10, 1, 0), (11, 1, 0)], [(10, 0, 0), (11, 0, 0)])
        assert [image.getpixel((0, 0)) for image in four.result().images][-1] == (23, 3, 0)
        assert with_lora.result().images[0].getpixel((0, 0)) == (30, 0, 0)
    (model,) = batching.send("/v1/models").json["data"]
    assert model["batching"]["16x16"] == {
        "images": [2, 4],
        "gains": {"2": 1.5, "4": 2.0},
        "largest_difference": 1,
    }


def test_images_are_drawn_one_by_one_where_batches_gain_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIVACE_TEST_BATCHES", "do not gain")
    with fake(tmp_path, batch=True) as server:
        answer = server.draw(seed=20, n=4)
        assert [image.getpixel((0, 0))[1] for image in answer.images] == [0, 0, 0, 0], "no other beside it"
        (model,) = server.send("/v1/models").json["data"]
        assert model["batching"]["16x16"]["images"] == []


@pytest.mark.parametrize(("prompt", "status"), [("refuse", 400), ("break", 500), ("die", 503)])
def test_an_image_that_fails_harms_none_that_is_drawn_with_it(
    batching: Served, prompt: str, status: int, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(8) as clients:
        slow = clients.submit(batching.draw, "hold first")
        batching.wait_for("running", 1)
        first = clients.submit(batching.draw, "x")  # takes the place after the slow one
        batching.wait_for("waiting", 1)
        wait_for_messages(batching, 2)
        good = [clients.submit(batching.draw, seed=seed) for seed in (1, 2, 3)]
        bad = clients.submit(batching.draw, prompt)
        batching.wait_for("waiting", 5)
        (tmp_path / "first").touch()
        assert [each.result().status for each in (slow, first)] == [200, 200]
        assert [each.result().images[0].getpixel((0, 0)) for each in good] == [
            (seed, 0, 0) for seed in (1, 2, 3)
        ]
        assert bad.result().status == status


def test_one_client_that_leaves_a_batch_ends_its_own_image_alone(batching: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as clients:
        slow = clients.submit(batching.draw, "hold first")
        batching.wait_for("running", 1)
        first = clients.submit(batching.draw, "x")  # takes the place after the slow one
        wait_for_messages(batching, 2)
        left = batching.leave("hold both")
        batching.wait_for("waiting", 2)
        stays = clients.submit(batching.draw, "hold both")
        batching.wait_for("waiting", 3)
        (tmp_path / "first").touch()
        assert [each.result().status for each in (slow, first)] == [200, 200]
        batching.wait_for("running", 2)
        left.close()
        batching.wait_for("cancelled", 1)
        (tmp_path / "both").touch()
        assert stays.result().status == 200


def test_a_lora_that_does_not_fit_is_named_with_why(batching: Served) -> None:
    answer = batching.draw(loras=[{"name": "unfit"}])
    assert (answer.status, answer.message) == (400, "'unfit' cannot be used: it is of another model")
    missing = batching.draw(loras=[{"name": "b"}])
    assert missing.message == "no LoRA 'b'; there are: a"
    (model,) = batching.send("/v1/models").json["data"]
    assert (model["loras"], model["unfit_loras"]) == (["a"], {"unfit": "it is of another model"})


def test_a_hung_worker_that_reads_nothing_is_killed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of emoji fill the pipe to a worker that has stopped reading."""
    monkeypatch.setattr("vivace.serve.queue.replica._CANCEL_GRACE_S", 1.0)
    process = server.pool.replicas[0]._process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    long = "\N{GRINNING FACE}" * 8000
    with ThreadPoolExecutor(2) as clients:
        sent = [
            clients.submit(server.draw, long, negative_prompt=long, seed=each, timeout=0.5) for each in (1, 2)
        ]
        assert [each.result().status for each in sent] == [504, 504]
    assert server.draw(seed=3, timeout=20).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert server.pool.replicas[0].num_restarts == 1
