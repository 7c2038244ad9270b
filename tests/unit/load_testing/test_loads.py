"""Loads on a server that draws one image at a time, and answers that are none."""

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.loaded_server import loaded_server
from vivace.benchmark.load_testing.load_target import ExchangeFailed, LoadTarget, exchange
from vivace.benchmark.load_testing.stages import LoadLimit, closed_loop, phases_of, poisson, poisson_arrivals


def target_of(url: str, timeout_s: float = 10.0) -> LoadTarget:
    return LoadTarget(url, "shapes", prompts=("a red circle",), timeout_s=timeout_s)


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


def test_arrivals_are_at_random_and_the_same_again() -> None:
    arrivals = poisson_arrivals(10.0, LoadLimit(2000), 1)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04), "exponential"
    assert (
        arrivals == poisson_arrivals(10.0, LoadLimit(2000), 1) != poisson_arrivals(10.0, LoadLimit(2000), 2)
    )
    assert len(poisson_arrivals(10.0, LoadLimit(seconds=20.0), 1)) == pytest.approx(200, rel=0.2)
    assert len(poisson_arrivals(0.01, LoadLimit(seconds=1.0, least=8), 1)) == 8


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


@contextlib.contextmanager
def answering(content: bytes) -> Iterator[str]:
    """A server that answers one request with these bytes, and closes the connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(content)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/x"
    thread.join()
    listening.close()


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
    ],
)
def test_answers_are_read_in_every_form(content: bytes, body: bytes) -> None:
    with answering(content) as url:
        reply = asyncio.run(exchange(urlsplit(url), {}, b"{}", 5.0))
    assert (reply.status, reply.content) == (200, body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30_000,
    ],
)
def test_an_answer_that_is_none_is_an_error_of_its_own(content: bytes) -> None:
    with answering(content) as url, pytest.raises(ExchangeFailed) as caught:
        asyncio.run(exchange(urlsplit(url), {}, b"{}", 5.0))
    assert caught.value.kind == "broken answer"


def test_a_server_that_says_nothing_is_left_in_time() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    began = time.monotonic()
    with pytest.raises(ExchangeFailed) as caught:
        url = urlsplit(f"http://127.0.0.1:{listening.getsockname()[1]}/x")
        asyncio.run(exchange(url, {}, b"{}", 0.2))
    listening.close()
    assert (caught.value.kind, str(caught.value)) == ("timeout", "no answer within 0.2 s")
    assert time.monotonic() - began < 3


def test_server_timing_is_read_as_servers_write_it() -> None:
    assert phases_of("queue;dur=0.5, denoise;desc=x;dur=120.25,cache;dur=1.2.3, miss") == {
        "queue": 0.5,
        "denoise": 120.25,
    }
