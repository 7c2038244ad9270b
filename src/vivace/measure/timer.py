"""Time a whole pipeline call and its stages.

The total is the wall-clock time of the call, with the device synchronised before and after. Marks inside it are set
at the start and end of text encoding, the encoding of images, denoising and decoding: host clock on CPUs, device
events on GPUs, so that marking never waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vivace.foundation.spec.record import Sample
from vivace.machinery.technique import component_of
from vivace.measure.accelerator import recorded_event, synchronise

STAGES = ("text", "encode", "steps", "vae", "other")
"""`encode` only for calls that start from an image."""


class PipelineTimer:
    """Times calls made through `time_call`. It is attached once to a pipeline instance, never to its class."""

    def __init__(self, pipe: Any, device: str) -> None:
        self._device = device
        self._marks: dict[str, Any] = {}
        self._encodings: list[tuple[Any, Any]] = []
        self._num_denoiser_calls = 0
        if hasattr(pipe, "encode_prompt"):
            pipe.encode_prompt = self._marking(pipe.encode_prompt, "text_start", "text_end")
        denoiser = component_of(pipe, "denoiser")
        # First, so that it includes the work of step caches before the forward, which may call the forward.
        denoiser.register_forward_pre_hook(self._start_step, prepend=True)
        denoiser.register_forward_hook(self._end_step)
        self._pipe = pipe
        self._watch_vae()

    def _watch_vae(self) -> None:
        vae = getattr(self._pipe, "vae", None)
        if vae is not None:
            vae.decode = self._marking(vae.decode, "vae_start", "vae_end")
            if hasattr(vae, "encode"):
                vae.encode = self._marking_each(vae.encode)

    def time_call(self, call: Callable[[], Any], image: int) -> tuple[Any, Sample]:
        """Run `call` (one pipeline call) and return its result and the timed sample of image `image`."""
        self._marks = {}
        self._encodings = []
        self._num_denoiser_calls = 0
        synchronise(self._device)
        cpu_start = time.process_time()
        start = time.perf_counter()
        result = call()
        synchronise(self._device)
        total = time.perf_counter() - start
        cpu = time.process_time() - cpu_start
        return result, Sample(
            picture=image,
            total_s=total,
            cpu_s=cpu,
            stages_s=self._stages(total),
            num_denoiser_calls=self._num_denoiser_calls,
        )

    def _stages(self, total: float) -> dict[str, float]:
        text = self._between("text_start", "text_end")
        steps = self._between("steps_start", "vae_start" if "vae_start" in self._marks else "steps_end")
        vae = self._between("vae_start", "vae_end")
        encode = sum(self._seconds(start, end) for start, end in self._encodings)
        # Device events can end slightly after the host's measurement; "other" must not be negative.
        stages = {
            "text": text,
            "steps": steps,
            "vae": vae,
            "other": max(0.0, total - text - encode - steps - vae),
        }
        return stages | ({"encode": encode} if self._encodings else {})

    def _between(self, first: str, last: str) -> float:
        if first not in self._marks or last not in self._marks:
            return 0.0
        return self._seconds(self._marks[first], self._marks[last])

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._device != "cpu" else float(end - start)

    def _mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def _now(self) -> Any:
        return time.perf_counter() if self._device == "cpu" else recorded_event(self._device)

    def _marking_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the start and the end of every call: an image and its masked version are encoded apart."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = function(*args, **kwargs)
            self._encodings.append((start, self._now()))
            return result

        return marked

    def _marking(self, function: Callable[..., Any], start: str, end: str) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._mark(start)
            result = function(*args, **kwargs)
            self._mark(end)
            return result

        return marked

    def _start_step(self, module: Any, args: Any) -> None:
        if self._num_denoiser_calls == 0:
            self._mark("steps_start")
        self._num_denoiser_calls += 1

    def _end_step(self, module: Any, args: Any, output: Any) -> None:
        self._mark("steps_end")
