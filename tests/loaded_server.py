"""An OpenAI images server that draws one image at a time, for tests of load."""

import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


def _png() -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class LoadedServer(ThreadingHTTPServer):
    """The server. `bodies` are those that were posted.

    Args:
        seconds: of an image.
        fault: "busy" answers every third request with 429, "key" wants one, "empty" has no image in its answers,
            "several models" lists two.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seconds: float, fault: str) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.seconds, self.fault = seconds, fault
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextlib.contextmanager
def loaded_server(seconds: float = 0.01, fault: str = "") -> Iterator[LoadedServer]:
    """Yield a server that runs in a thread."""
    server = LoadedServer(seconds, fault)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    server: LoadedServer
    png = _png()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        names = ["one", "two"] if self.server.fault == "several models" else ["shapes"]
        self._answer(200, {"data": [{"id": name, "recipe": "fast"} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.fault
        self.server.bodies.append(body)
        if fault == "key" and self.headers["Authorization"] != "Bearer secret-word":
            self._answer(401, {"error": {"message": "no key"}})
        elif fault == "busy" and len(self.server.bodies) % 3 == 0:
            self._answer(429, {"error": {"message": "too many"}}, {"Retry-After": "0.01"})
        else:
            with self.server.lock:
                time.sleep(self.server.seconds)
            data = [] if fault == "empty" else [{"b64_json": self.png}]
            timing = f"queue;dur=0.0, denoise;dur={1000 * self.server.seconds:.1f}"
            self._answer(200, {"data": data}, {"Server-Timing": timing})

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that has gone
            self.wfile.write(data)
