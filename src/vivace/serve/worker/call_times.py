"""When the parts of a call ended: on the GPU, which works long after the call has returned, or on the CPU."""

from __future__ import annotations

import math
import time
from typing import Any


class CallTimes:
    """Marks of a call, in order.

    Args:
        device: torch's type of the device that the call computes on.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of what has been queued until now."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        self._marks.append(event)

    def wait_for_last_but_one(self) -> None:
        """Wait until all but the last part have ended, so that the CPU runs ahead of the GPU by one part at most."""
        if self._on_gpu and len(self._marks) > 1:
            self._marks[-2].synchronize()

    def seconds(self) -> list[float]:
        """Wait until all parts have ended; return the seconds from each mark to the next."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._on_gpu:
            return [end - begin for begin, end in pairs]
        self._marks[-1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def phases_of(seconds: list[float]) -> tuple[dict[str, float], int]:
    """Return the seconds of a call by phase, and its steps.

    The first step's part has the text encoder in it, which is what it took longer than the others.

    Args:
        seconds: of the LoRA's exchange, of each step, and of the rest.
    """
    lora, *steps, rest = seconds
    step_s = math.fsum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else 0.0
    text_s = max(0.0, steps[0] - step_s) if steps else 0.0
    return {"lora": lora, "text": text_s, "denoise": math.fsum(steps) - text_s, "decode": rest}, len(steps)
