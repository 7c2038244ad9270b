"""A worker of the server whose session sleeps as one that waits for a GPU does: it needs no core, and lets threads run.

VIVACE_TEST_CALLS names a file that gets a line for each call: `time.perf_counter()` of its begin and of its end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from vivace.foundation.processes.protocol import send_event
from vivace.runtime.finite_images import FiniteCheck
from vivace.serve.queue.messages import Load
from vivace.serve.worker import main as worker
from vivace.serve.worker.warm_session import Drawing, Editing, LoraFolder

COMMAND = (sys.executable, "-m", "tests.sleeping_worker")
SIZE = 1024
CALL_S = 0.1
_STEPS = 4


class SleepingSession:
    """Stands in for a session: four steps of a fortieth of a second, then an image in one colour, the seed's."""

    device = "cpu"
    recipe = SimpleNamespace(text="baseline")
    defaults = MappingProxyType({"num_inference_steps": _STEPS, "width": SIZE, "height": SIZE})
    on_step: Any = None

    def __init__(self) -> None:
        self.pipe = SimpleNamespace(components={})
        self.check = FiniteCheck()
        self._calls = Path(os.environ["VIVACE_TEST_CALLS"])

    def __call__(self, prompt: str, generator: Any, **call: Any) -> Any:
        from PIL import Image

        began = time.perf_counter()
        for step in range(1, _STEPS + 1):
            time.sleep(CALL_S / _STEPS)
            self.on_step(step, None, SIZE, SIZE)
        image = Image.new("RGB", (SIZE, SIZE), (generator.initial_seed() % 256, 0, 0))
        ended = time.perf_counter()
        with self._calls.open("a") as file:
            print(began, ended, file=file)
        return SimpleNamespace(images=[image])

    def cancel(self) -> bool:
        return False


def _load(message: Load, inbox: worker.Inbox, events: Any) -> bool:
    session: Any = SleepingSession()
    inbox.drawing = Drawing(session, message, 8, True, Editing("fake"), LoraFolder())
    state = {
        "name": "sleeping",
        "recipe": "baseline",
        "device": "cpu",
        "steps": _STEPS,
        "guidance": None,
        "size": f"{SIZE}x{SIZE}",
        "multiple": 8,
        "takes": [],
        "guided_above": None,
        "speeds": {f"{SIZE}x{SIZE}": {"step_s": CALL_S / _STEPS, "rest_s": 0.0}},
        "has_partials": False,
        "notes": [],
        "draws_text": True,
        "edits": Editing("fake").state(),
        "batching": {},
        "unfit_loras": {},
    }
    send_event(events, {"event": "loaded", "state": state})
    return True


if __name__ == "__main__":
    worker._load = _load
    worker._import_libraries, worker._import_model = lambda: None, lambda name: None
    worker.main()
