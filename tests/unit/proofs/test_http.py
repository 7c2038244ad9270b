"""Servers that are busy, slow or chatty."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from vivace.proofs import http
from vivace.proofs.http import NoAnswer, NoConnection, has_same_host, send, send_patiently


@contextmanager
def answering(answers: list[bytes], after: Callable[[socket.socket], None] | None = None) -> Iterator[str]:
    """Yield the address of a server that gives these raw answers, one a connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for content in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(content)
                if after is not None:
                    after(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    thread.join(5)
    listener.close()


def raw(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_busy_server_is_waited_for_as_long_as_it_says() -> None:
    waits: list[float] = []
    busy = [
        raw("429 Busy", b"", "Retry-After: 7"),
        raw("503 Busy"),
        raw("503 Busy", b"", "Retry-After: 9999"),
    ]
    with answering([*busy, raw("200 OK", b"{}")]) as url:
        answer = send_patiently(url, {}, 5, sleep=waits.append)
    assert (answer.status, answer.busy) == (200, (429, 503, 503))
    assert waits == [7, 1.0, 60]


def test_a_server_that_says_to_come_back_at_once_gets_more_time_each_time() -> None:
    waits: list[float] = []
    with answering([*[raw("429 Busy", b"", "Retry-After: 0")] * 4, raw("200 OK", b"{}")]) as url:
        answer = send_patiently(url, {}, 5, sleep=waits.append)
    assert answer.status == 200
    assert waits == [0.1, 0.2, 0.4, 0.8]


def test_a_server_that_stays_busy_is_an_answer_in_the_end() -> None:
    waits: list[float] = []
    with answering([raw("429 Busy")] * 8) as url:
        answer = send_patiently(url, {}, 5, sleep=waits.append)
    assert answer.status == 429
    assert not answer.is_refusal
    assert waits == [0.5, 1, 2, 4, 8, 16, 32]


def test_a_server_that_sends_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(connection: socket.socket) -> None:
        with pytest.raises(OSError):  # noqa: PT011  reset or broken pipe
            while True:
                connection.sendall(b"x" * 1000)

    endless = b"HTTP/1.1 200 OK\r\n\r\n"
    with answering([endless], drip) as url, pytest.raises(NoAnswer, match=r"no answer within 0\.3 s"):
        send(url, None, 0.3)
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 5000)
    with answering([endless], drip) as url, pytest.raises(NoAnswer, match="more than 5,000 bytes"):
        send(url, None, 5)


def test_a_connection_that_breaks_and_none_at_all() -> None:
    with answering([b""]) as url, pytest.raises(NoAnswer, match=r"the connection broke|no connection"):
        send(url, None, 5)
    with pytest.raises(NoConnection, match="is the server running"):
        send("http://127.0.0.1:9/", None, 5)


def test_a_certificate_that_is_not_trusted_or_none_is_said_to_be() -> None:
    with answering([raw("400 Bad")]) as url, pytest.raises(NoConnection, match="SSL_CERT_FILE="):
        send(url.replace("http:", "https:"), None, 5)


def test_the_servers_own_words_are_quoted_and_harmless() -> None:
    body = json.dumps({"error": {"message": "no\x1b[2J such\nsize"}}).encode()
    with answering([raw("400 Bad", body), raw("500 Oops", b"<html>trace")]) as url:
        assert send(url, {}, 5).complaint == "HTTP 400: no\\x1b[2J such size"
        assert send(url, {}, 5).complaint == "HTTP 500: <html>trace"


def test_hosts_are_the_same_with_their_port_and_scheme() -> None:
    assert has_same_host("http://a:1/x", "http://a:1/y")
    assert not has_same_host("http://a:1/x", "http://a:2/x")
    assert not has_same_host("http://a:1/x", "https://a:1/x")
