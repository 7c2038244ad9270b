"""An OpenAI images server that draws one image at a time, for tests of load."""

import base64
import contextlib
import hashlib
import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


def png_of(body: dict[str, Any], size: str | None = None) -> str:
    """Return an image of the size that is asked for, whose colour is that of the prompt and the seed."""
    colour = hashlib.sha256(f"{body['prompt']} {body.get('seed')}".encode()).digest()
    width, height = map(int, (size or body.get("size", "8x8")).split("x"))
    file = io.BytesIO()
    Image.new("RGB", (width, height), tuple(colour[:3])).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class LoadedServer(ThreadingHTTPServer):
    """The server. `bodies` are those that were posted.

    Args:
        seconds: of an image.
        fault: "busy" answers every third request with 429, "key" wants one, "empty" has no image in its answers,
            "several models" lists two, "one image" answers everything with one of 64x64, "blind" with one of the size
            that is asked for, "cut" with the beginning of one,
            "addresses" with addresses of images, "foreign addresses" with those of another server.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seconds: float, fault: str) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.seconds, self.fault = seconds, fault
        self.bodies: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
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

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.files:
            self._answer(200, self.server.files[self.path])
            return
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
            data: list[dict[str, Any]] = [{"b64_json": png_of(body)}]
            if fault == "empty":
                data = []
            elif fault == "one image":
                data = [{"b64_json": png_of({"prompt": ""}, "64x64")}]
            elif fault == "cut":
                data[0]["b64_json"] = data[0]["b64_json"][:60]
            elif fault.endswith("addresses"):
                host = "other.invalid" if fault.startswith("foreign") else self.headers["Host"]
                self.server.files[f"/{len(self.server.files)}.png"] = base64.b64decode(data[0]["b64_json"])
                data = [{"url": f"http://{host}/{len(self.server.files) - 1}.png"}]
            elif fault == "blind":
                data = [{"b64_json": png_of({"prompt": ""}, body.get("size"))}]
            timing = f"queue;dur=0.0, denoise;dur={1000 * self.server.seconds:.1f}"
            self._answer(200, {"data": data}, {"Server-Timing": timing})

    def _answer(
        self, status: int, content: dict[str, Any] | bytes, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that has gone
            self.wfile.write(data)
