"""Connections that cost something and bring nothing: clients that wait, do not read, send too much or too many."""

import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve_worker import COMMAND
from tests.served import EDITS, PATH, Served, form_of, served
from tests.unit.serve.test_edits import png
from tests.unit.serve.test_restarts import wait_until
from vivace.serve.http import request_checks
from vivace.serve.http.connections import Connection
from vivace.serve.settings import ServeSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files here let the worker go on, as prompts say."""
    return tmp_path_factory.mktemp("x")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    settings = ServeSettings("fake", "baseline", timeout_s=30.0)
    with served(settings, COMMAND, VIVACE_TEST_DIED=str(folder / "died")) as running:
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


def test_a_client_that_sent_another_request_is_seen_to_leave(server: Served) -> None:
    before = server.states()["cancelled"]
    client = connect(server, 2 * request("slow 10", num_inference_steps=50))
    server.wait_for("running", 1)
    client.close()
    server.wait_for("cancelled", before + 1)
    server.wait_for("running", 0)  # fails after 20 s; the steps would take 50
    assert server.states()["waiting"] == 0
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)


def test_requests_that_are_sent_at_once_are_answered_in_order(server: Served) -> None:
    sent = b"".join(request("x", seed=seed, user="u" * 300) for seed in range(200))
    assert len(sent) > 65_536
    client = connect(server, sent + b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answers = received(client)
    assert answers.count(b"HTTP/1.1 200 ") == 201
    seeds = [int(part.split(b",")[0]) for part in answers.split(b'"seed":')[1:]]
    assert seeds == list(range(200))


def test_a_client_that_does_not_take_its_answer_is_cut_off(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vivace.serve.http.connections._LONGEST_STALL_S", 0.3)
    caplog.set_level(logging.WARNING, "vivace.serve")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", server.port))
    client.settimeout(10)
    sent = b"GET /dashboard.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000
    with contextlib.suppress(OSError):  # it is cut off while it still sends
        client.sendall(sent)
        client.sendall(sent)
    until = time.monotonic() + 20
    while "does not take its answer is cut off" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.05)
    client.close()


def test_a_slow_client_gets_all_of_its_answer(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.serve.http.connections._LONGEST_STALL_S", 0.4)
    monkeypatch.setattr("vivace.serve.http.connections._LEAST_TAKEN", 2_000)
    page = server.send("/").body
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", server.port))
    client.settimeout(10)
    number = 30
    client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * (number - 1))
    client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    data = b""
    while part := client.recv(8192):
        data += part
        time.sleep(0.005)
    client.close()
    assert data.count(page) == number


def test_idle_connections_make_room_for_others(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "most", 20)
    drawing = connect(server, request("hold one", seed=7))
    server.wait_for("running", 1)
    begun = connect(server, f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n".encode())
    idle = [connect(server) for _ in range(60)]
    (folder / "one").touch()
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert b'"seed":7' in drawing.recv(65536), "a request at work is not cut off"
    closed = 0
    for client in [*idle, begun, drawing]:
        client.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            try:
                closed += client.recv(1) == b""
            except ConnectionResetError:
                closed += 1
        client.close()
    assert closed >= 40


def test_more_requests_at_work_than_there_may_be_are_refused(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "most", 3)
    drawing = [connect(server, request("hold three", seed=seed)) for seed in (7, 8, 9)]
    until = time.monotonic() + 10
    while server.pool.ledger.states["waiting"] + server.pool.ledger.states["running"] < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    refused = received(connect(server))
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"too many connections" in refused
    (folder / "three").touch()
    for client in drawing:
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.close()
    assert server.send("/livez").status == 200


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


def test_a_socket_is_not_upgraded(server: Served) -> None:
    upgrade = "upgrade: websocket\r\nconnection: upgrade, close\r\nsec-websocket-version: 13"
    key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    answer = received(
        connect(server, f"GET / HTTP/1.1\r\nhost: localhost\r\n{upgrade}\r\n{key}\r\n\r\n".encode())
    )
    assert not answer.startswith(b"HTTP/1.1 101")


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limits on open files")
def test_the_limit_on_files_is_raised_and_connections_stay_below_it() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "from vivace.serve.http.connections import most_connections;"
        "print(most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    for soft, hard, expected in ((256, 4096, "2000 4096"), (256, 1024, "768 1024")):
        text = code.format(soft=soft, hard=hard)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
