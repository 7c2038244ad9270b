"""Servers that are busy, slow, chatty, or no servers of HTTP."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from vivace.benchmark.load_testing import images_endpoint
from vivace.benchmark.load_testing.images_endpoint import HttpServer, NoAnswer


def read_request(connection: socket.socket) -> None:
    """Read headers and body: a connection that is closed before loses its answer, too."""
    request = connection.recv(65536)
    while b" HTTP/" in request:  # and no beginning of TLS
        head, end, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if end and (length is None or len(body) >= int(length[1])):
            return
        request += connection.recv(65536)


@contextmanager
def answering(
    answers: list[bytes], after: Callable[[socket.socket], None] = lambda connection: None
) -> Iterator[HttpServer]:
    """Yield a server that gives these raw answers, one a connection, and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for content in answers:
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                connection.sendall(content)
                after(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield HttpServer(f"http://127.0.0.1:{listener.getsockname()[1]}", 5.0)
    thread.join(5)
    listener.close()


def raw(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("busy", "waits"),
    [
        ([("429", "Retry-After: 7"), ("503",), ("503", "Retry-After: 9999")], [7, 1.0, 60]),
        ([("429", "Retry-After: 0")] * 4, [0.1, 0.2, 0.4, 0.8]),
        ([("429",)] * 8, [0.5, 1, 2, 4, 8, 16, 32]),
    ],
)
def test_a_busy_server_is_waited_for_as_it_says_and_longer_each_time(
    busy: list[tuple[str, ...]], waits: list[float]
) -> None:
    slept: list[float] = []
    answers = [raw(f"{status} Busy", b"", *headers) for status, *headers in busy]
    with answering([*answers, raw("200 OK", b"{}")][:8]) as server:
        answer = server.send_patiently("/", {}, sleep=slept.append)
    assert slept == waits
    assert answer.status == (200 if len(busy) < 8 else 429), "in the end busy is its answer"
    assert not answer.is_refusal
    assert len(answer.busy) == len(waits)


def test_a_server_that_sends_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(connection: socket.socket) -> None:
        with suppress(OSError):  # reset or broken pipe
            while True:
                connection.sendall(b"x" * 1000)

    endless = b"HTTP/1.1 200 OK\r\n\r\n"
    with answering([endless], drip) as server, pytest.raises(NoAnswer, match=r"no answer within 0\.3 s"):
        server.send("/", None, 0.3)
    monkeypatch.setattr(images_endpoint, "MAX_ANSWER_BYTES", 5000)
    with answering([endless], drip) as server, pytest.raises(NoAnswer, match="more than 5,000 bytes"):
        server.send("/", None)


def test_a_server_that_says_nothing_is_left_in_time() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(NoAnswer) as caught:
        HttpServer(f"http://127.0.0.1:{listener.getsockname()[1]}").send("/", {}, 0.2)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 3


def test_no_connection_and_a_certificate_that_is_not_trusted() -> None:
    with pytest.raises(NoAnswer, match="is the server running") as caught:
        HttpServer("http://127.0.0.1:9").send("/", None)
    assert caught.value.kind == "no connection"
    with answering([raw("400 Bad")]) as server, pytest.raises(NoAnswer, match="SSL_CERT_FILE="):
        HttpServer(server.url.replace("http:", "https:")).send("/", None)


def test_the_servers_own_words_are_quoted_and_harmless() -> None:
    body = json.dumps({"error": {"message": "no\x1b[2J such\nsize"}}).encode()
    away = raw("307 Away", b"", "Location: http://elsewhere/")
    with answering([raw("400 Bad", body), raw("500 Oops", b"<html>trace"), away]) as server:
        assert server.send("/", {}).complaint == "HTTP 400: no\\x1b[2J such size"
        assert server.send("/", {}).complaint == "HTTP 500: <html>trace"
        assert "it redirects to http://elsewhere/" in server.send("/", {}).complaint


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
    ],
)
def test_answers_are_read_in_every_form(content: bytes, body: bytes) -> None:
    with answering([content]) as server:
        assert server.send("/", {}).content == body
