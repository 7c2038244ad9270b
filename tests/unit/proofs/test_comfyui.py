"""A ComfyUI server with a workflow: values go where they belong, and failures are lines."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.drawn_shapes import draw
from tests.proved import SETTINGS as ASKED
from tests.proved import SHAPES, proof_of
from vivace.errors import UsageError
from vivace.proofs.sides.comfyui_side import Workflow
from vivace.proofs.sides.side import ImageSettings

WORKFLOW: dict[str, Any] = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 1,
            "steps": 20,
            "cfg": 8.0,
            "positive": ["12", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 512, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "old", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "ugly", "clip": ["4", 1]}},
    "12": {"class_type": "FluxGuidance", "inputs": {"conditioning": ["6", 0], "guidance": 3.5}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}},
}
SETTINGS = ImageSettings(96, 64, 8, 4.0)


def saved(folder: Path, nodes: object = WORKFLOW) -> Path:
    path = folder / "workflow.json"
    path.write_text(json.dumps(nodes))
    return path


def test_values_go_to_the_sampler_its_positive_text_and_the_latent(tmp_path: Path) -> None:
    nodes = Workflow(str(saved(tmp_path))).filled("a red circle", 7, SETTINGS)
    assert nodes["3"]["inputs"] | {"seed": 7, "steps": 8, "cfg": 4.0} == nodes["3"]["inputs"]
    assert nodes["6"]["inputs"]["text"] == "a red circle"
    assert nodes["7"]["inputs"]["text"] == "ugly"
    assert (nodes["5"]["inputs"]["width"], nodes["5"]["inputs"]["height"]) == (64, 96)
    kept = Workflow(str(saved(tmp_path))).filled("a red circle", 7, ImageSettings())
    assert kept["3"]["inputs"]["steps"] == 20


def test_placeholders_say_where_values_go(tmp_path: Path) -> None:
    nodes = {
        "1": {"class_type": "Own", "inputs": {"words": "photo of %prompt%, grain", "start": "%seed%"}},
        "2": {"class_type": "KSampler", "inputs": {"seed": 1, "note": "seed %seed%"}},
    }
    filled = Workflow(str(saved(tmp_path, nodes))).filled("%seed% cats", 7, SETTINGS)
    assert filled["1"]["inputs"] == {"words": "photo of %seed% cats, grain", "start": 7}
    assert filled["2"]["inputs"] == {"seed": 1, "note": "seed 7"}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"nodes": [], "links": []}, "not a workflow in the API format"),
        ({"1": {"class_type": "Own", "inputs": {"seed": 1}}}, "nothing says where prompt go"),
        ({"1": {"class_type": "Own", "inputs": {"words": "%prompt%"}}}, "nothing says where seed go"),
        ([], "not an object"),
    ],
)
def test_what_is_no_such_workflow_says_so(tmp_path: Path, nodes: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workflow(str(saved(tmp_path, nodes)))


class _Comfy(BaseHTTPRequestHandler):
    done: dict[str, dict[str, Any]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        nodes = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.done[str(len(self.done))] = nodes
        self._answer({"prompt_id": str(len(self.done) - 1)})

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        number = parts.path.rpartition("/")[2]
        if parts.path.startswith("/history/"):
            self._answer({number: self._entry(number, self.done[number])})
            return
        nodes = self.done[parse_qs(parts.query)["filename"][0].removesuffix(".png")]
        sampler, size = nodes["3"]["inputs"], nodes["5"]["inputs"]
        file = io.BytesIO()
        draw(
            nodes["6"]["inputs"]["text"],
            sampler["seed"],
            size["width"],
            size["height"],
            sampler["steps"],
            sampler["cfg"],
        ).save(file, "PNG")
        self._send(file.getvalue())

    def _entry(self, number: str, nodes: dict[str, Any]) -> dict[str, Any]:
        if "green" in nodes["6"]["inputs"]["text"]:
            error = ["execution_error", {"node_type": "VAEDecode", "exception_message": "out of paint"}]
            return {"status": {"status_str": "error", "messages": [error]}, "outputs": {}}
        file = {"filename": f"{number}.png", "subfolder": "", "type": "output"}
        return {"status": {"status_str": "success"}, "outputs": {"9": {"images": [file]}}}

    def _answer(self, value: object) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def comfyui() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Comfy", (_Comfy,), {"done": {}}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_draws_what_the_reference_draws(tmp_path: Path) -> None:
    prompts = ["a red shape", "a blue shape", "a green shape"]
    with comfyui() as url:
        side = f"comfyui:{url}?workflow={saved(tmp_path)}"
        proof = proof_of(tmp_path, SHAPES, side, *ASKED, "--claim", "same", prompts=prompts)
    assert [pair["nearness"] for pair in proof["pairs"][:2]] == ["as near as the reference is to itself"] * 2
    (failure,) = proof["failures"]
    assert failure["reason"] == "the workflow failed: VAEDecode: out of paint"
    assert {check["status"] for check in proof["checks"]} == {"passed"}
    assert len(proof["checks"]) == 14
    assert proof["exit_code"] == 4
