"""How long images take: the parts of a call, and a size one by one and several at once, measured once it is warm."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vivace.errors import VivaceError, WorkloadError
from vivace.foundation.untrusted.files import is_out_of_memory
from vivace.models.sources import example_images

if TYPE_CHECKING:
    from PIL.Image import Image

    from vivace.runtime.session import Session

_Result = TypeVar("_Result")
_TIMED_STEPS = 4
_LEAST_GAIN = 1.1
"""Smallest ratio of a batch's images per second to those of single images for which batches are formed."""
_CALLS = 2
"""Number of calls, the fastest of which counts."""
_PROMPT = "a photograph of a red apple"


class CallTimes:
    """When the parts of a call ended: on the GPU, which works long after the call has returned, or on the CPU."""

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
    """Return the seconds of a call by phase, and its steps, of those of the LoRA's exchange, each step, and the rest.

    The first step's part has the text encoder in it, which is what it took longer than the others.
    """
    lora, *steps, rest = seconds
    step_s = math.fsum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else 0.0
    text_s = max(0.0, steps[0] - step_s) if steps else 0.0
    return {"lora": lora, "text": text_s, "denoise": math.fsum(steps) - text_s, "decode": rest}, len(steps)


@dataclass(frozen=True)
class TimedSize:
    """Seconds of a step and of everything else, and the latents after the last step with their image."""

    step_s: float
    rest_s: float
    latents: Any
    image: Image


def time_size(session: Session, width: int, height: int) -> TimedSize:
    """Draw twice, so that later images of this size compile nothing, and time the second call.

    Draw once with a prompt of each length that graphs are kept of, too.
    """
    steps, _ = in_few_steps(session, _TIMED_STEPS, lambda few: _draw(session, width, height, few))
    for prompt in session.prompts_to_warm:
        in_few_steps(session, 2, functools.partial(_draw, session, width, height, prompt=prompt))
    times = CallTimes(session.device)
    latents: list[Any] = [None]

    def on_step(step: int, tensor: Any, height: int, width: int) -> None:
        times.mark()
        latents[:] = [tensor]

    session.on_step = on_step
    try:
        times.mark()
        (image,) = _draw(session, width, height, steps)
        times.mark()
    finally:
        session.on_step = None
    parts = times.seconds()
    total, between = math.fsum(parts), parts[1:-1]
    step_s = math.fsum(between) / len(between) if between else total
    return TimedSize(step_s, max(0.0, total - step_s * (len(parts) - 1)), latents[0], image)


def time_batches(session: Session, width: int, height: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Time several images at once beside one by one; return `vivace.serve.settings.Batching` as plain data.

    A batch size is allowed if it gains a tenth over single images, and something over smaller sizes. If a size gains
    almost nothing its double is not timed: a second doubling brings no more than the first.
    """
    steps, (alone_s, _) = in_few_steps(
        session, _TIMED_STEPS, lambda few: _timed(session, width, height, few, 1)
    )
    alone: list[np.ndarray[Any, Any]] = []
    gains: dict[int, float] = {}
    allowed: list[int] = []
    difference = 0
    for number in sorted(numbers):
        if gains.get(number // 2, 2.0) ** 2 < _LEAST_GAIN:
            break
        try:
            seconds, images = _timed(session, width, height, steps, number)
        except VivaceError:
            break
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        gains[number] = number * alone_s / seconds
        if gains[number] < max(_LEAST_GAIN, *(gains[each] for each in allowed), 0.0):
            continue
        allowed.append(number)
        for seed in range(len(alone), number):
            alone.append(np.asarray(_draw(session, width, height, steps, (seed,))[0]))
        difference = max(difference, *(_difference(image, alone[k]) for k, image in enumerate(images)))
    return {"gains": gains, "allowed": allowed, "difference": difference}


def _timed(session: Session, width: int, height: int, steps: int, number: int) -> tuple[float, list[Image]]:
    """Return the seconds of a call that draws so many images, and the images."""
    images = _draw(session, width, height, steps, tuple(range(number)))
    fastest = float("inf")
    for _ in range(_CALLS):
        began = time.perf_counter()
        images = _draw(session, width, height, steps, tuple(range(number)))
        fastest = min(fastest, time.perf_counter() - began)
    return fastest, images


def _draw(
    session: Session,
    width: int,
    height: int,
    steps: int,
    seeds: tuple[int, ...] = (0,),
    prompt: str = _PROMPT,
) -> list[Image]:
    import torch

    size = {"height": height, "width": width}
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = size | example_images(type(session.pipe).__name__, size)
    output = session(
        prompt if len(seeds) == 1 else [prompt] * len(seeds),
        num_inference_steps=steps,
        generator=generators[0] if len(seeds) == 1 else generators,
        **call,
    )
    return list(output.images)


def in_few_steps(session: Session, most: int, draw: Callable[[int], _Result]) -> tuple[int, _Result]:
    """Draw in few steps, or in the model's own number with a sampler that takes no fewer; return it and the result."""
    own = int(session.defaults["num_inference_steps"])
    try:
        return min(own, most), draw(min(own, most))
    except WorkloadError:
        return own, draw(own)


def _difference(image: Image, alone: np.ndarray[Any, Any]) -> int:
    return int(np.abs(np.asarray(image).astype(int) - alone.astype(int)).max())
