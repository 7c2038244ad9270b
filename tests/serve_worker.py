"""A worker for tests of the server: draws one colour, and does what prompts say.

"slow 3"   a step takes three tenths of a second
"hold a"   a step ends once the file "a" lies beside that of VIVACE_TEST_DIED; "keep a": so does the image, when the
           call has returned
"die"      the process ends at the first step; "die once" does so while the file of VIVACE_TEST_DIED is missing
"hang"     a step never ends, while the file of VIVACE_TEST_DIED is missing
"compile"  it says that the first step takes longer
"deaf"     a cancel is ignored
"break"    drawing raises
"refuse"   the model refuses
"seed 7 breaks", "seed 7 dies"  so does the image of that seed
"half"     the memory for images is full before all of one is written

With VIVACE_TEST_LEAVES a process that dies has written an image. With VIVACE_TEST_HANGS loading hangs, in the phase
that it names, while the file of VIVACE_TEST_DIED is missing. With VIVACE_TEST_UNUSABLE loading fails while it is there;
if that is "second", the first of two that load creates it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from vivace.errors import Unsupported
from vivace.foundation.processes.protocol import send_event
from vivace.serve.queue.messages import Draw, Load, image_file
from vivace.serve.worker import main as worker

COMMAND = (sys.executable, "-m", "tests.serve_worker")
SIZE = 16
ENERGY = {"energy_j": 2.5}


GAINS = {"gain": {"2": 1.5, "4": 2.0}, "do not gain": {"2": 1.02}}
"""By VIVACE_TEST_BATCHES."""


class FakeDrawing:
    """Stands in for `vivace.serve.worker.warm_session.Drawing`."""

    def __init__(self, request: Load) -> None:
        self.request = request

    def cancel(self) -> None:
        pass  # `report` raises after the step

    def state(self) -> dict[str, Any]:
        return {
            "name": "fake",
            "recipe": "baseline",
            "device": "cpu",
            "steps": 4,
            "guidance": 5.0,
            "size": f"{SIZE}x{SIZE}",
            "multiple": 8,
            "takes": ["guidance_scale", "negative_prompt"],
            "guided_above": 1.0,
            "speeds": {
                f"{SIZE}x{SIZE}": {"step_s": 0.01, "rest_s": 0.01},
                f"{4 * SIZE}x{4 * SIZE}": {"step_s": 1.0, "rest_s": 1.0},
            },
            "has_partials": True,
            "notes": [],
            "draws_text": True,
            "edits": {
                "tasks": ["image", "inpaint"],
                "refused": {},
                "takes": ["guidance_scale", "negative_prompt", "strength"],
                "strength": 0.5,
                "rounds_up": False,
                "most_images": 1,
            },
            "batching": {f"{SIZE}x{SIZE}": self._batching()} if self.request.batches else {},
            "unfit_loras": {path: "it is of another model" for path in self.request.loras if "unfit" in path},
        }

    def _batching(self) -> dict[str, Any]:
        gains = GAINS[os.environ.get("VIVACE_TEST_BATCHES", "gain")]
        allowed = [int(number) for number, gain in gains.items() if gain >= 1.1]
        return {"gains": gains, "allowed": allowed, "difference": 1}

    def draw(self, request: Draw, report: Any) -> Any:
        words = " ".join(request.prompts).split()
        if "refuse" in words:
            raise Unsupported("the model refuses")
        own = words[2:3] if words[:1] == ["seed"] and int(words[1]) in request.seeds else []
        if "break" in words or own == ["breaks"]:
            raise RuntimeError("the model broke")
        steps = request.call["num_inference_steps"]
        if "compile" in words:
            report("compiling", {})
        for step in range(1, steps + 1):
            time.sleep(0.1 * float(words[words.index("slow") + 1]) if "slow" in words else 0.001)
            _wait_for_file(words, "hold")
            if "hang" in words and not Path(os.environ["VIVACE_TEST_DIED"]).exists():
                self._dies(False)
                time.sleep(600)
            if "half" in words:
                self._kept(request, "image")
                raise OSError(errno.ENOSPC, "No space left on device")
            if ("die" in words or own == ["dies"]) and self._dies("once" in words):
                if "VIVACE_TEST_LEAVES" in os.environ:
                    self._kept(request, "image")
                os._exit(7)
            fields: dict[str, Any] = {"step": step}
            if step in request.partials:
                fields["images"] = self._kept(request, f"p{step}")
            try:
                report("step", fields)
            except Exception:
                if "deaf" not in words:
                    raise
        phases = {"text": 0.0, "denoise": 0.01, "decode": 0.0}

        def finish() -> dict[str, Any]:
            _wait_for_file(words, "keep")
            return {
                "images": self._kept(request, "image"),
                "phases": phases,
                "steps": steps,
                "rss_bytes": 1000,
                **ENERGY,
            }

        return finish

    def _dies(self, once: bool) -> bool:
        marker = Path(os.environ["VIVACE_TEST_DIED"])
        if once and marker.exists():
            return False
        marker.touch()
        return True

    def _kept(self, request: Draw, name: str) -> list[dict[str, Any]]:
        """Keep images: red is the seed, green how many others one call drew, blue the first byte of an image sent."""
        width, height = request.call["width"], request.call["height"]
        blue = Path(request.pictures[0].file).read_bytes()[0] if request.pictures else 0
        kept = []
        for job, seed in zip(request.ids, request.seeds, strict=True):
            path = image_file(Path(self.request.folder), job, name)
            path.write_bytes(bytes([seed % 256, len(request.ids) - 1, blue]) * (width * height))
            kept.append({"file": str(path), "width": width, "height": height})
        return kept


def _wait_for_file(words: list[str], verb: str) -> None:
    """Wait for the file whose name follows the verb, as a test that decides what comes first lets it."""
    if verb not in words:
        return
    file = Path(os.environ["VIVACE_TEST_DIED"]).with_name(words[words.index(verb) + 1])
    until = time.monotonic() + 60
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


def _load(message: Load, inbox: worker.Inbox, events: Any) -> bool:
    marker = Path(os.environ.get("VIVACE_TEST_DIED", "missing"))
    if (phase := os.environ.get("VIVACE_TEST_HANGS")) and not marker.exists():
        marker.touch()
        send_event(events, {"event": "phase", "phase": phase, "at": time.monotonic()})
        time.sleep(60)
    if (which := os.environ.get("VIVACE_TEST_UNUSABLE")) and (marker.exists() or which == "second"):
        if which == "second" and _is_first(marker):
            return _loaded(message, inbox, events)
        send_event(events, {"event": "unusable", "message": "the weights are gone"})
        return False
    return _loaded(message, inbox, events)


def _is_first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _loaded(message: Load, inbox: worker.Inbox, events: Any) -> bool:
    inbox.drawing = FakeDrawing(message)
    send_event(events, {"event": "loaded", "state": inbox.drawing.state()})
    return True


if __name__ == "__main__":
    worker._load, worker._import_libraries, worker._import_model = _load, lambda: None, lambda name: None
    worker.main()
