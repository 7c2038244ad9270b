"""Which job is next, and how many may wait."""

import asyncio
import time
from pathlib import Path

import pytest

from vivace.foundation.spec.sizes import Size
from vivace.serve.queue.jobs import EXCHANGE_S, ImageJob, JobQueue, QueueFull, RequestedLora
from vivace.serve.settings import ModelState, StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def job(name: str, seconds: float, lora: str | None = None, owner: str = "") -> ImageJob:
    of_lora = None if lora is None else RequestedLora(lora, Path(lora), 1.0)
    return ImageJob(name, 0, Size(8, 8), 1, {}, seconds, float("inf"), of_lora, owner)


async def order(line: JobQueue, jobs: list[ImageJob], lora: str | None = None) -> list[str]:
    for each in jobs:
        await line.put(each)
    names = []
    for _ in jobs:
        (taken,) = await line.take(lora)
        lora = None if taken.lora is None else taken.lora.name
        names.append(taken.prompt)
        line.leave(taken)
    return names


def test_short_jobs_come_first_and_equal_ones_in_order() -> None:
    async def run() -> None:
        line = JobQueue(9, 100)
        assert await order(line, [job("large", 9), job("a", 1), job("b", 1)]) == ["a", "b", "large"]

    asyncio.run(run())


def test_a_large_job_does_not_wait_for_ever() -> None:
    async def run() -> None:
        clock = Clock()
        line = JobQueue(99, 1000, clock=clock)
        large = job("large", 3)
        await line.put(large)
        for number in range(20):
            await line.put(job(f"small {number}", 1))
            (taken,) = await line.take(None)
            line.leave(taken)
            clock.now += 1
            if taken is large:
                break
        assert number in (12, 13), "four times its own seconds"

    asyncio.run(run())


def test_requests_of_a_lora_follow_each_other() -> None:
    async def run() -> None:
        jobs = [job("a", 1, "x"), job("b", 1, "y"), job("c", 1, "x"), job("d", 1 - 2 * EXCHANGE_S, "y")]
        assert await order(JobQueue(9, 100), jobs, "x") == ["d", "b", "a", "c"]

    asyncio.run(run())


def test_the_line_is_bounded_by_number_and_by_seconds() -> None:
    async def run() -> None:
        line = JobQueue(2, 10, num_workers=lambda: 2)
        line.check_room(5)  # an empty line takes a request of several images
        await line.put(job("a", 8))
        await line.put(job("b", 8))
        with pytest.raises(QueueFull, match="2 images wait, and no more than 2 may") as raised:
            line.check_room(1)
        assert raised.value.retry_after_s == 4
        wide = JobQueue(9, 10)
        await wide.put(job("a", 30))
        with pytest.raises(QueueFull, match="about 30 s, and no more than 10 may") as raised:
            wide.check_room(1)
        assert raised.value.retry_after_s == 20

    asyncio.run(run())


def test_clients_that_are_refused_come_back_one_after_the_other() -> None:
    async def run() -> None:
        line = JobQueue(2, 1000, clock=lambda: 0.0)
        await line.put(job("a", 8))
        await line.put(job("b", 8))
        times = []
        for _ in range(3):
            with pytest.raises(QueueFull) as raised:
                line.check_room(1)
            times.append(raised.value.retry_after_s)
        assert times == [8, 16, 24]

    asyncio.run(run())


def test_owners_of_keys_take_turns_and_share_the_places() -> None:
    async def run() -> None:
        line = JobQueue(8, 1000, num_owners=lambda: 2)
        for number in range(4):
            await line.put(job(f"many {number}", 1, owner="anna"))
        with pytest.raises(QueueFull, match="4 images of this key wait, and no more than 4 may"):
            line.check_room(1, "anna")
        line.check_room(4, "bert")
        await line.take(None)
        await line.put(job("one", 1, owner="bert"))
        await line.put(job("two", 1, owner="bert"))
        order = [(await line.take(None))[0].prompt for _ in range(5)]
        assert order == ["many 1", "one", "many 2", "two", "many 3"]

    asyncio.run(run())


def test_a_job_is_not_lost_with_the_worker_that_was_woken_for_it() -> None:
    async def run() -> None:
        line = JobQueue(9, 100)
        dying, living = (asyncio.create_task(line.take(None)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await line.put(job("a", 1))
        dying.cancel()
        (taken,) = await asyncio.wait_for(living, 5)
        assert taken.prompt == "a"

    asyncio.run(run())


def test_a_worker_that_still_draws_lets_an_idle_one_go_first() -> None:
    async def run() -> None:
        line = JobQueue(9, 100, num_workers=lambda: 2)
        is_drawing = True
        busy = asyncio.create_task(line.take(None, lambda: not is_drawing))
        idle = asyncio.create_task(line.take(None))
        await asyncio.sleep(0.01)
        await line.put(job("a", 1))
        assert (await asyncio.wait_for(idle, 5))[0].prompt == "a"
        await line.put(job("b", 1))
        assert (await asyncio.wait_for(busy, 5))[0].prompt == "b", "nobody is idle any more"
        busy, idle = (
            asyncio.create_task(line.take(None, lambda: not is_drawing)),
            asyncio.create_task(line.take(None)),
        )
        await asyncio.sleep(0.01)
        idle.cancel()
        await line.put(job("c", 1))
        assert (await asyncio.wait_for(busy, 5))[0].prompt == "c"

    asyncio.run(run())


def test_a_job_at_a_worker_waits_until_it_is_drawn() -> None:
    async def run() -> None:
        clock = Clock()
        line = JobQueue(2, 100, clock=clock)
        for name in "ab":
            await line.put(job(name, 10))
        (first,), (second,) = await line.take(None), await line.take(None)
        line.begin(first)
        clock.now += 4
        assert line.seconds() == 16, "the second has not begun"
        line.check_room(1)
        with pytest.raises(QueueFull, match="1 images wait"):
            line.check_room(2)
        line.leave(first)
        line.begin(second)
        assert line.seconds() == 10

    asyncio.run(run())


def test_batches_are_of_jobs_that_one_call_draws() -> None:
    def batches(first: ImageJob) -> tuple[int, ...]:
        return (2, 4)

    async def run() -> None:
        line = JobQueue(99, 1000)
        jobs = [job("a", 1), job("b", 1, "x"), job("c", 1), job("d", 1), job("e", 1, "x")]
        other = job("f", 1)
        other.call = {"num_inference_steps": 2}
        for each in [*jobs, other]:
            await line.put(each)
        taken = []
        for _ in range(4):
            some = await line.take(None, batches=batches)
            taken.append("".join(each.prompt for each in some))
            for each in some:
                line.leave(each)
        assert taken == ["ac", "d", "f", "be"], "never across LoRAs or steps, and in numbers that were timed"

    asyncio.run(run())


def test_times_of_other_sizes_are_predicted_by_their_pixels() -> None:
    speeds = {Size(512, 512): StepTimes(0.1, 0.5), Size(1024, 1024): StepTimes(0.4, 1.0)}
    state = ModelState("m", "r", "cpu", 20, 5.0, Size(512, 512), 8, frozenset(), 1.0, speeds, True)
    assert state.predicted_s(Size(512, 512), 10) == pytest.approx(1.5)
    assert state.predicted_s(Size(1024, 2048), 10) == pytest.approx(10.0)


def test_the_time_to_come_back_is_of_the_measured_rate() -> None:
    """A machine that is slower than at its start tells clients to come back later."""

    async def run() -> None:
        line = JobQueue(2, 1000)
        await line.put(job("a", 1))
        await line.put(job("b", 1))
        with pytest.raises(QueueFull) as before:
            line.check_room(1)
        for _ in range(40):
            line.note_drawn(1.0, 5.0)
        line._promised.clear()
        with pytest.raises(QueueFull) as after:
            line.check_room(1)
        assert (before.value.retry_after_s, after.value.retry_after_s) == (1, 5)
        assert line.seconds() == pytest.approx(10, rel=0.05)

    asyncio.run(run())
