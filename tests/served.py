"""A server in this process, on a port of its own, and what its clients send."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image

from tests.serve_worker import COMMAND as FAKE
from vivace.serve.http.app import create_app
from vivace.serve.queue.pool import ReplicaPool, WorkerSource
from vivace.serve.queue.process import COMMAND, Workers
from vivace.serve.settings import ServeSettings

PATH = "/v1/images/generations"
EDITS = "/v1/images/edits"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def images(self) -> list[Image.Image]:
        return [image_of(entry["b64_json"]) for entry in self.json["data"]]


def image_of(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def form_of(fields: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return a form with files, and its content type."""
    parts = []
    for name, value in fields.items():
        parts.append(f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode())
    for name, data in files.items():
        head = f'content-disposition: form-data; name="{name}"; filename="x.png"\r\n'
        parts.append(head.encode() + b"content-type: image/png\r\n\r\n" + data)
    body = b"".join(b"--limit\r\n" + part + b"\r\n" for part in parts) + b"--limit--\r\n"
    return body, "multipart/form-data; boundary=limit"


@dataclass
class Served:
    """A running server."""

    port: int
    pool: ReplicaPool
    app: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> Answer:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Answer(answer.status, _headers(answer), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _headers(error), error.read())

    def draw(self, prompt: str = "a red circle", **fields: Any) -> Answer:
        return self.send(PATH, {"prompt": prompt, **fields})

    def edit(
        self, prompt: str = "a red circle", files: Mapping[str, bytes] | None = None, **fields: Any
    ) -> Answer:
        """Send the form of an edit; files by their names in it."""
        body, kind = form_of({"prompt": prompt, **fields}, files or {})
        return self.send(EDITS, body, {"content-type": kind})

    def states(self) -> dict[str, int]:
        """Images by state, as /metrics has them, which must add up."""
        lines = self.send("/metrics").body.decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        states = {
            name.split('"')[1]: int(float(value))
            for name, value in values.items()
            if "vivace_images{" in name
        }
        assert sum(states.values()) == int(float(values["vivace_images_accepted_total"]))
        return states

    def wait_for(self, state: str, number: int, timeout: float = 20) -> None:
        until = time.monotonic() + timeout
        while (reached := self.states()[state]) != number:
            assert time.monotonic() < until, f"{reached} images are {state}, not {number}"
            time.sleep(0.05)

    def leave(self, prompt: str, **fields: Any) -> socket.socket:
        """Send a request whose client can go away: close what is returned."""
        body = json.dumps({"prompt": prompt, **fields}).encode()
        client = socket.create_connection(("127.0.0.1", self.port))
        head = ["host: localhost", "content-type: application/json", f"content-length: {len(body)}"]
        client.sendall("\r\n".join([f"POST {PATH} HTTP/1.1", *head, "", ""]).encode() + body)
        return client


def _headers(answer: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


def fake(folder: Path, **settings: Any) -> AbstractContextManager[Served]:
    """Run a server whose workers do what prompts say; see tests/serve_worker.py, which marks its folder."""
    fields: dict[str, Any] = {"model": "fake", "recipe": "baseline", "timeout_s": 30.0}
    return served(ServeSettings(**fields | settings), FAKE, VIVACE_TEST_DIED=str(folder / "died"))


def served(
    settings: ServeSettings, command: tuple[str, ...] = COMMAND, **variables: str
) -> AbstractContextManager[Served]:
    """Run a server until its worker is ready, and then the test."""
    return served_by(settings, Workers(settings, command, variables))


@contextlib.contextmanager
def served_by(settings: ServeSettings, workers: WorkerSource) -> Iterator[Served]:
    """Run a server with these workers until it is ready, and then the test."""
    app = create_app(settings, workers)
    # uvicorn waits 5 s for the rest of a request that follows another on its connection: so would a test.
    config = uvicorn.Config(
        app,
        port=0,
        http="h11",
        ws="none",
        log_level="error",
        timeout_keep_alive=2,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 120
    while not (server.started and app.state.pool.is_ready):
        assert time.monotonic() < until, "the server is not ready"
        assert thread.is_alive()
        time.sleep(0.02)
    yield Served(server.servers[0].sockets[0].getsockname()[1], app.state.pool, app)
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()
