"""The line before Ray's replicas, with replicas that are lost when the test says so; and the command's options."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vivace.cli import app
from vivace.errors import UsageError, VivaceError
from vivace.foundation.spec.sizes import Size
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, JobPicture, RequestedLora, State
from vivace.serve.queue.ray_application import Replicas
from vivace.serve.queue.ray_drawer import DrawerEvent, Order
from vivace.serve.queue.ray_pool import RayPool
from vivace.serve.settings import ModelState, ServeSettings, StepTimes

SIZE = Size(16, 16)
STATE = ModelState(
    "fake", "baseline", "cpu", 4, None, SIZE, 8, frozenset(), None, {SIZE: StepTimes(0.01, 0.01)}, True
)


class Lost(Exception):
    """A replica was lost."""


class FakeStream:
    def __init__(self, drawers: "FakeDrawers", order: Order) -> None:
        self.drawers, self.order = drawers, order
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[DrawerEvent]:
        drawers = self.drawers
        drawers.flying += 1
        drawers.most_flying = max(drawers.most_flying, drawers.flying)
        try:
            drawers.began.append(self.order.seed)
            if drawers.began.count(self.order.seed) <= drawers.losses.get(self.order.seed, 0):
                raise Lost("the node is gone")
            yield DrawerEvent(step=1, drawn=self.image())
            for _ in range(drawers.ticks):
                await asyncio.sleep(0.01)
                if self.is_cancelled:
                    raise Lost("cancelled")
            if self.order.prompt == "refuse":
                yield DrawerEvent(error=(400, "the model refuses"), drawer="a")
                return
            ended = {"steps": 4, "phases": {}, "rss_bytes": 7}
            yield DrawerEvent(drawn=self.image(), ended=ended, drawer="a", restarts=1, exchanges=2)
        finally:
            drawers.flying -= 1

    def image(self) -> Drawn:
        return Drawn(b"", 16, 16, self.order.seed, {})


class FakeDrawers:
    def __init__(self, running: int = 1, losses: dict[int, int] | None = None, ticks: int = 1) -> None:
        self.running, self.losses, self.ticks = running, losses or {}, ticks
        self.began: list[int] = []
        self.flying = self.most_flying = self.counts = 0

    def draw(self, order: Order) -> FakeStream:
        return FakeStream(self, order)

    async def state(self) -> tuple[ModelState | None, str | None]:
        return STATE, None

    async def num_running(self) -> int:
        self.counts += 1
        if self.counts == 1:
            raise Lost("the controller starts")
        return self.running


def job(seed: int, prompt: str = "x", seconds: float = 30.0) -> ImageJob:
    return ImageJob(prompt, seed, SIZE, 4, {}, 0.1, time.monotonic() + seconds)


def drawn(drawers: FakeDrawers, *prompts: str, ahead: int = 1) -> tuple[RayPool, list[ImageJob], list[Any]]:
    """Draw an image for each prompt; return the jobs and their results or errors."""
    jobs: list[ImageJob] = []

    async def draw() -> tuple[RayPool, list[Any]]:
        pool = RayPool(ServeSettings("fake", "baseline"), lambda job, event: None, drawers, ahead, (Lost,))
        pool.start()
        while not pool.is_ready:
            await asyncio.sleep(0.01)
        jobs.extend(job(seed, prompt) for seed, prompt in enumerate(prompts))
        await pool.submit(jobs)
        results = await asyncio.gather(*(pool.wait(each) for each in jobs), return_exceptions=True)
        await pool.stop()
        return pool, results

    pool, results = asyncio.run(draw())
    return pool, jobs, results


def test_an_image_whose_replica_is_lost_is_drawn_by_another_from_its_own_seed() -> None:
    drawers = FakeDrawers(losses={1: 2})
    pool, _, results = drawn(drawers, "x", "x", "x")
    assert [image.seed for image in results] == [0, 1, 2]
    assert drawers.began.count(1) == 3
    assert (pool.ledger.accepted, pool.ledger.states[State.DONE]) == (3, 3)
    (replica,) = pool.replicas
    assert (replica.num_restarts, replica.num_exchanges, replica.memory) == (1, 2, {"rss_bytes": 7})


def test_an_image_that_loses_three_replicas_is_given_up() -> None:
    pool, _, results = drawn(FakeDrawers(losses={0: 99}), "x", "x")
    assert isinstance(results[0], JobError)
    assert (results[0].status, str(results[0])) == (503, "3 replicas were lost while they drew this image")
    assert results[1].seed == 1
    assert pool.ledger.states[State.FAILED] == 1


def test_a_drawer_draws_what_the_server_was_asked_for() -> None:
    async def both() -> tuple[ImageJob, ImageJob]:
        picture = JobPicture("image", "RGB", 1, 1, b"abc")
        lora = RequestedLora("ink", Path("ink.safetensors"), 0.5)
        call = {"strength": 0.5}
        sent = ImageJob("x", 3, SIZE, 4, call, 0.1, time.monotonic() + 30, lora, "image", (picture,), (2,))
        return sent, Order.of(sent).job()

    sent, drawn_there = asyncio.run(both())
    fields = ("prompt", "seed", "size", "steps", "call", "lora", "task", "pictures", "partials")
    assert [getattr(drawn_there, name) for name in fields] == [getattr(sent, name) for name in fields]
    assert drawn_there.deadline == pytest.approx(sent.deadline, abs=1)


def test_what_the_model_refuses_is_refused() -> None:
    _, _, results = drawn(FakeDrawers(), "refuse")
    assert isinstance(results[0], JobError)
    assert (results[0].status, str(results[0])) == (400, "the model refuses")


@pytest.mark.parametrize(("running", "ahead", "most"), [(1, 1, 1), (3, 1, 3), (2, 2, 4)])
def test_as_many_images_are_sent_as_there_are_replicas(running: int, ahead: int, most: int) -> None:
    drawers = FakeDrawers(running, ticks=3)
    drawn(drawers, *["x"] * 12, ahead=ahead)
    assert drawers.most_flying == most


def test_a_client_that_goes_away_ends_its_image_there() -> None:
    async def leave() -> tuple[RayPool, FakeDrawers]:
        drawers = FakeDrawers(ticks=1000)
        pool = RayPool(ServeSettings("fake", "baseline"), lambda job, event: None, drawers, 1, (Lost,))
        pool.start()
        first, second = job(0), job(1)
        await pool.submit([first, second])
        while first.state is not State.RUNNING or not drawers.flying:
            await asyncio.sleep(0.01)
        pool.cancel(second)
        pool.cancel(first)
        while drawers.flying:
            await asyncio.sleep(0.01)
        await pool.stop()
        return pool, drawers

    pool, drawers = asyncio.run(asyncio.wait_for(leave(), 5))
    assert pool.ledger.states[State.CANCELLED] == 2
    assert drawers.began == [0], "neither again nor the one that waited"


@pytest.mark.parametrize(("text", "replicas"), [("3", Replicas(3, 3)), ("2-8", Replicas(2, 8))])
def test_replicas_are_read(text: str, replicas: Replicas) -> None:
    assert Replicas.of(text) == replicas


@pytest.mark.parametrize("text", ["", "0", "x", "8-2", "2-", "-2", "1-2-3", "²"])
def test_replicas_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--replicas"):
        Replicas.of(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "2"), "--replicas is for --ray"),
        (("--ray", "auto", "--gpus", "all"), "--gpus is for one machine; with --ray, give --replicas"),
        (("--ray", "auto", "--idle-unload", "5"), "--idle-unload is for one machine"),
        (("--ray", "auto", "--batch"), "--batch is for one machine"),
        (("--ray", "auto", "--recipe", "baseline", "--replicas", "8-2"), "the smaller number first"),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(
    arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "tiny-sd", *arguments], standalone_mode=False)
    assert isinstance(result.exception, VivaceError)
    assert message in str(result.exception)
