"""Connections that cost something and bring nothing: clients that wait, do not read, send too much or too many."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.served import EDITS, PATH, Served, fake, form_of
from tests.unit.serve.test_edits import png
from tests.unit.serve.test_restarts import wait_until
from vivace.serve.http import request_checks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files here let the worker go on, as prompts say."""
    return tmp_path_factory.mktemp("x")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with fake(folder) as running:
        yield running


def connect(server: Served, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(sent)
    return client


def request(prompt: str, **fields: object) -> bytes:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


def received(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    client.close()
    return data


def test_requests_that_are_sent_at_once_are_answered_in_order(server: Served) -> None:
    sent = b"".join(request("x", seed=seed, user="u" * 300) for seed in range(200))
    assert len(sent) > 65_536
    client = connect(server, sent + b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answers = received(client)
    assert answers.count(b"HTTP/1.1 200 ") == 201
    seeds = [int(part.split(b",")[0]) for part in answers.split(b'"seed":')[1:]]
    assert seeds == list(range(200))


def test_bodies_are_bounded_together(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "_MOST_BYTES", 300_000)
    kind = "content-type: multipart/form-data; boundary=limit"
    head = f"POST {EDITS} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: 900000\r\n\r\n".encode()
    part = b'--limit\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\n'
    in_progress: list[request_checks.Bodies] = []
    count = request_checks.BoundedBody._count

    def counted(body: request_checks.BoundedBody, num_bytes: int) -> Any:
        in_progress.append(body._bodies)
        return count(body, num_bytes)

    monkeypatch.setattr(request_checks.BoundedBody, "_count", counted)
    holding = connect(server, head + part + b"x" * 300_000)
    large = 300_000 - request_checks._SMALL_BODY
    wait_until(lambda: bool(in_progress) and in_progress[0].num_bytes >= large)
    body, form = form_of({"prompt": "x"}, {"image": png() + b"x" * 200_000})
    answer = server.send(EDITS, body, {"content-type": form})
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert "this one is large; send it again later" in answer.message
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0), "small ones are read"
    holding.close()
    wait_until(lambda: in_progress[0].num_bytes == 0)
    assert server.send(EDITS, body, {"content-type": form}).status == 200, "what was read is forgotten"
