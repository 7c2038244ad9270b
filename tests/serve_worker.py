"""A worker for tests of the server: draws one colour, and does what prompts say.

"slow 3"   a step takes three tenths of a second
"die"      the process ends at the first step; "die once" does so while the file of VIVACE_TEST_DIED is missing
"deaf"     a cancel is ignored
"break"    drawing raises
"refuse"   the model refuses
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from vivace.errors import Unsupported
from vivace.processes.protocol import send_event
from vivace.serve import worker
from vivace.serve.messages import Draw, Load, image_file

COMMAND = (sys.executable, "-m", "tests.serve_worker")
SIZE = 16


class FakeSession:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeDrawing:
    """Stands in for `vivace.serve.drawing.Drawing`."""

    def __init__(self, request: Load) -> None:
        self.request, self.session = request, FakeSession()

    def state(self) -> dict[str, Any]:
        return {
            "name": "fake",
            "recipe": "baseline",
            "device": "cpu",
            "steps": 4,
            "guidance": 5.0,
            "size": [SIZE, SIZE],
            "multiple": 8,
            "takes": ["guidance_scale", "negative_prompt"],
            "guided_above": 1.0,
            "speeds": [[SIZE, SIZE, 0.01, 0.01], [4 * SIZE, 4 * SIZE, 1.0, 1.0]],
            "has_partials": True,
            "notes": [],
        }

    def draw(self, request: Draw, report: Any) -> dict[str, Any]:
        words = request.prompt.split()
        self.session.is_cancelled = False
        if "refuse" in words:
            raise Unsupported("the model refuses")
        if "break" in words:
            raise RuntimeError("the model broke")
        steps = request.call["num_inference_steps"]
        for step in range(1, steps + 1):
            time.sleep(0.1 * float(words[words.index("slow") + 1]) if "slow" in words else 0.001)
            if "die" in words and self._dies("once" in words):
                os._exit(7)
            fields = {"step": step} | (self._kept(request, f"p{step}") if step in request.partials else {})
            try:
                report("step", fields)
            except Exception:
                if "deaf" not in words:
                    raise
        phases = {"text": 0.0, "denoise": 0.01, "decode": 0.0}
        return {**self._kept(request, "image"), "phases": phases, "steps": steps, "rss_bytes": 1000}

    def _dies(self, once: bool) -> bool:
        marker = Path(os.environ["VIVACE_TEST_DIED"])
        if once and marker.exists():
            return False
        marker.touch()
        return True

    def _kept(self, request: Draw, name: str) -> dict[str, Any]:
        path = image_file(Path(self.request.folder), request.id, name)
        width, height = request.call["width"], request.call["height"]
        path.write_bytes(bytes([request.seed % 256, 0, 0]) * (width * height))
        return {"file": str(path), "width": width, "height": height}


def _load(message: Load, inbox: worker.Inbox, events: Any) -> bool:
    inbox.drawing = FakeDrawing(message)
    send_event(events, {"event": "loaded", "state": inbox.drawing.state()})
    return True


if __name__ == "__main__":
    worker._load = _load
    worker.main()
