"""Loads on a server that draws one image at a time, and answers that are none."""

import asyncio

from tests.loaded_server import loaded_server
from vivace.benchmark.load_testing.images_endpoint import ImagesEndpoint
from vivace.benchmark.load_testing.load_target import LoadTarget, phases_of
from vivace.benchmark.load_testing.stages import LoadLimit, closed_loop, poisson


def target_of(url: str, timeout_s: float = 10.0) -> LoadTarget:
    return LoadTarget(ImagesEndpoint(url, timeout_s), "shapes", prompts=("a red circle",))


def quiet(number: int, elapsed_s: float) -> None:
    pass


def test_users_come_whether_or_not_the_server_is_behind() -> None:
    """At twice the capacity latency grows from one user to the next; a loop of clients would not show it."""
    with loaded_server(0.04) as server:
        samples = asyncio.run(poisson(target_of(server.url), 50.0, LoadLimit(40), 0, quiet))
    latencies = [end - due for due, end in zip(samples.due_s, samples.ended_s, strict=True)]
    assert set(samples.outcome) == {"done"}
    assert sum(latencies[-10:]) > 3 * sum(latencies[:10])
    lags = [sent - due for due, sent in zip(samples.due_s, samples.sent_s, strict=True)]
    assert max(lags) < 0.2, "requests leave when they are due, not when the server has time"
    assert samples.phases_ms["denoise"] == (40.0,) * 40


def test_an_image_behind_an_address_is_fetched_from_the_server_itself() -> None:
    with loaded_server(0.01, "addresses") as server:
        near = asyncio.run(closed_loop(target_of(server.url), 1, LoadLimit(3), 0, quiet))
    assert near.outcome == ("done",) * 3
    with loaded_server(0.01, "foreign addresses") as server:
        far = asyncio.run(closed_loop(target_of(server.url), 1, LoadLimit(1), 0, quiet))
    assert far.outcome == ("image on another server",)


def test_a_closed_loop_waits_for_its_images() -> None:
    with loaded_server(0.02) as server:
        samples = asyncio.run(closed_loop(target_of(server.url), 4, LoadLimit(24), 0, quiet))
    assert len(samples.due_s) == 24
    assert samples.due_s == samples.sent_s
    flying = [
        sum(sent <= at < end for sent, end in zip(samples.sent_s, samples.ended_s, strict=True))
        for at in samples.sent_s
    ]
    assert max(flying) == 4


def test_errors_are_outcomes_and_not_the_end() -> None:
    with loaded_server(0.01, "busy") as server:
        busy = asyncio.run(closed_loop(target_of(server.url), 2, LoadLimit(12), 0, quiet))
    assert {kind: busy.outcome.count(kind) for kind in set(busy.outcome)} == {"done": 8, "HTTP 429": 4}
    with loaded_server(0.01, "empty") as server:
        empty = asyncio.run(closed_loop(target_of(server.url), 1, LoadLimit(2), 0, quiet))
    assert empty.outcome == ("no image",) * 2
    with loaded_server(1.0) as server:
        slow = asyncio.run(closed_loop(target_of(server.url, 0.2), 1, LoadLimit(2), 0, quiet))
    assert slow.outcome == ("timeout",) * 2
    gone = asyncio.run(closed_loop(target_of("http://127.0.0.1:9/v1"), 1, LoadLimit(1), 0, quiet))
    assert gone.outcome == ("no connection",)


def test_server_timing_is_read_as_servers_write_it() -> None:
    assert phases_of("queue;dur=0.5, denoise;desc=x;dur=120.25,cache;dur=1.2.3, miss") == {
        "queue": 0.5,
        "denoise": 120.25,
    }
