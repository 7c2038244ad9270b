"""An OpenAI images endpoint that draws coloured shapes, honest unless a fault is planted."""

import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image, ImageFilter

from tests.drawn_shapes import draw, tinted

FIELDS = {
    "model",
    "prompt",
    "n",
    "seed",
    "size",
    "response_format",
    "num_inference_steps",
    "guidance_scale",
}
SLOW = ("confused by load", "confused by many", "one at a time", "spoiled by a cancelled request")
_LORAS = ("LoRA", "LoRA ignored", "LoRA at half strength", "LoRA stays on")
FURTHER_FIELDS = dict.fromkeys(_LORAS, ("loras",)) | {"ignored negative prompt": ("negative_prompt",)}
"""Fields that the server takes, by its fault."""


def animated(*frames: Any) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def entries(*contents: bytes) -> bytes:
    return json.dumps({"data": [{"b64_json": base64.b64encode(c).decode()} for c in contents]}).encode()


_SQUARE = png(draw("a red square", 0))
ODD_ANSWERS = {
    "fewer": (200, b'{"data": []}'),
    "more": (200, entries(_SQUARE, _SQUARE)),
    "cut": (200, entries(_SQUARE[: len(_SQUARE) // 2])),
    "bits": (200, b'{"data": [{"b64_json": "?"}]}'),
    "empty": (200, b'{"data": [{"b64_json": ""}]}'),
    "gone": (200, b'{"data": [{"url": "/files/none.png"}]}'),
    "html": (200, b"<html>welcome</html>"),
    "null": (200, b"null"),
    "busy": (429, b'{"error": {"message": "come back later"}}'),
    "broken": (500, b"Internal Server Error"),
    "animated": (200, entries(animated(draw("a red square", 0), draw("a blue square", 0)))),
    "gif": (200, entries(b"GIF89a" + bytes(40))),
    "larger": (200, entries(png(draw("a red square", 0, 128, 96)))),
}
"""Status and body by the second word of the prompt."""


class ImagesServer(ThreadingHTTPServer):
    """The server. `requests` are the bodies that were posted."""

    daemon_threads = True

    def __init__(self, fault: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.fault = fault
        self.requests: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.num_busy = self.num_active = 0
        self.was_cancelled = False
        self.lora = 0.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextlib.contextmanager
def serving(fault: str = "") -> Iterator[ImagesServer]:
    """Yield a server that runs in a thread."""
    server = ImagesServer(fault)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    server: ImagesServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            names = ["one", "two"] if self.server.fault == "several models" else ["shapes"]
            self._answer(200, {"data": [{"id": name} for name in names]})
        elif self.path in self.server.files:
            self._send(200, "image/png", self.server.files[self.path])
        else:
            self._answer(404, {"error": {"message": "no such file"}})

    def do_POST(self) -> None:
        fault = self.server.fault
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.num_busy += fault == "busy"
            is_busy = fault == "busy" and self.server.num_busy % 3 == 1
        if fault == "key" and self.headers.get("Authorization") != "Bearer pass-word":
            self._answer(401, {"error": {"message": "no key"}})
        elif is_busy:
            self._answer(429, {"error": {"message": "too many requests"}}, {"Retry-After": "0"})
        elif fault == "redirects":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/v1/images/generations")
            self.end_headers()
        elif fault == "timeout" and "green" in body["prompt"]:
            time.sleep(1.2)
            self._answer(200, {"data": []})
        elif fault == "odd answers" and (odd := ODD_ANSWERS.get(body["prompt"].split()[1])) is not None:
            self._send(odd[0], "application/json", odd[1], {"Retry-After": "0"})
        elif (why := self._why_wrong(body)) is not None:
            self._answer(400, {"error": {"message": why}})
        elif fault == "one at a time" and self.server.num_active > 0:
            self._answer(429, {"error": {"message": "busy"}}, {"Retry-After": "0"})
        else:
            self._draw(body)

    def _draw(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.num_active += 1
        time.sleep(0.05 if self.server.fault in SLOW else 0.005)
        if self.server.fault in SLOW and self.server.num_active > 1:
            time.sleep(0.1)
        is_cancelled = False
        self.connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            is_cancelled = self.connection.recv(1, socket.MSG_PEEK) == b""
        self.connection.setblocking(True)
        data = [] if is_cancelled else self._data(body)
        with self.server.lock:
            self.server.num_active -= 1
            self.server.was_cancelled |= is_cancelled
        claims = {"says the size": "96x96", "says another size": "512x512"}
        size = claims.get(self.server.fault)
        self._answer(200, {"data": data} | ({} if size is None else {"size": size}))

    def _why_wrong(self, body: dict[str, Any]) -> str | None:
        if self.server.fault == "ignores fields":
            return None
        unknown = set(body) - FIELDS - set(FURTHER_FIELDS.get(self.server.fault, ()))
        if unknown:
            return f"unknown field {unknown.pop()}"
        if self.server.fault == "one image a request" and body.get("n", 1) > 1:
            return "n is 1"
        if not 1 <= body.get("n", 1) <= 10 or body.get("num_inference_steps", 1) < 1:
            return "out of range"
        parts = body.get("size", "96x96").split("x")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            return "size is WIDTHxHEIGHT"
        return None

    def _data(self, body: dict[str, Any]) -> list[dict[str, str]]:
        fault = self.server.fault
        number = 1 if fault in ("fewer", "ignores fields") else body.get("n", 1)
        return [self._entry(body, index) for index in range(number)]

    def _entry(self, body: dict[str, Any], index: int) -> dict[str, str]:
        fault = self.server.fault
        seed = body["seed"] + index
        if fault == "switched seed":
            seed += 1
        if fault == "ignored seed":
            seed = 0
        if fault == "batch changes seed" and body.get("n", 1) > 1:
            seed += 100
        if fault == "batches of two":
            seed = body["seed"] + index % 2
        if fault == "confused by many" and self.server.num_active > 4:
            seed += 40
        if fault == "seeds of 31 bits":
            seed %= 2**31
        if fault == "at most 2^31 - 1":
            seed = min(seed, 2**31 - 1)
        if fault == "confused by load" and self.server.num_active > 2:
            seed += 50
        if fault == "spoiled by a cancelled request" and self.server.was_cancelled:
            seed, self.server.was_cancelled = seed + 60, False
        if fault == "every fourth of another model" and len(self.server.requests) % 4 == 0:
            seed += 70
        if fault == "random":
            seed = time.monotonic_ns()
        parts = body.get("size", "96x96").split("x")
        width, height = map(int, parts) if len(parts) == 2 else (96, 96)
        if fault == "ignored size":
            width = height = 96
        steps = 8 if fault == "ignored steps" else max(1, body.get("num_inference_steps", 8))
        if fault == "half the steps":
            steps //= 2
        prompt = body["prompt"]
        if fault == "cut prompts":
            prompt = prompt[:40]
        if fault == "20 words":
            prompt = " ".join(prompt.split()[:19])
        if fault == "quotes stripped":
            prompt = prompt.replace('"', "")
        if fault == "ASCII alone":
            prompt = prompt.encode("ascii", "ignore").decode().strip()
        guidance = body.get("guidance_scale", 4.0)
        if fault == "guidance of at most 5":
            guidance = min(guidance, 5.0)
        if fault == "half the guidance":
            guidance /= 2
        picture = draw(prompt, seed, width, height, steps, guidance)
        if fault == "resized":
            picture = draw(prompt, seed, 96, 96, steps, guidance).resize((width, height))
        if "LoRA" in fault:
            picture = tinted(picture, self._strength(body))
        if fault == "blurred":
            picture = picture.filter(ImageFilter.GaussianBlur(1.5))
        count = len(self.server.requests)
        if fault == "holes" and count % 4 == 0:
            picture.paste((0, 0, 0), (30, 40, 54, 60))
        if fault == "degrades" and count > 6:
            picture = picture.filter(ImageFilter.GaussianBlur((count - 6) / 12))
        if fault == "blurred at times" and count % 4 == 0:
            picture = picture.filter(ImageFilter.GaussianBlur(0.7))
        if fault == "black" and body["seed"] == 1:
            picture = Image.new("RGB", picture.size)
        file = io.BytesIO()
        if fault == "webp":
            picture.save(file, "WEBP", quality=90)
        else:
            picture.save(file, "PNG")
        if fault == "no image":
            return {"b64_json": base64.b64encode(b"<html>oops</html>").decode()}
        if fault in ("url", "elsewhere"):
            path = f"/files/{len(self.server.files)}.png"
            self.server.files[path] = file.getvalue()
            host = f"http://127.0.0.1:{self.server.server_address[1]}"
            return {"url": f"{'http://elsewhere.invalid' if fault == 'elsewhere' else host}{path}"}
        return {"b64_json": base64.b64encode(file.getvalue()).decode()}

    def _strength(self, body: dict[str, Any]) -> float:
        strength = sum(lora.get("scale", 1.0) for lora in body.get("loras", ()))
        fault = self.server.fault
        if fault == "LoRA stays on":
            self.server.lora = strength = max(strength, self.server.lora)
        return float({"LoRA ignored": 0.0, "LoRA at half strength": strength / 2}.get(fault, strength))

    def _answer(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(value).encode(), headers)

    def _send(self, status: int, kind: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):  # a client that has given up
            self.send_response(status)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                **(headers or {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
