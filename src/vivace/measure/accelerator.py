"""Time calls and read memory, on the GPUs of all makers. `device` is torch's type: "cpu", "cuda" (AMD's
GPUs too), "xpu" or "mps"."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vivace.foundation.processes.system import peak_resident_bytes, reset_resident_peak
from vivace.foundation.spec.record import Memory, Sample
from vivace.machinery.technique import COMPONENTS, component_of

GPUS = ("cuda", "xpu", "mps")
"""Types of GPU in the order of preference."""


def available_gpu() -> str | None:
    """Return the type of GPU that this PyTorch can use, None if there is none."""
    return next((device for device in GPUS if is_available(device)), None)


def is_available(device: str) -> bool:
    import torch

    if device == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def synchronise(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        _module(device).synchronize()


def recorded_event(device: str) -> Any:
    """Return an event that the GPU reaches after all earlier work; `elapsed_time` between two is in milliseconds."""
    module = _module(device)
    event = (module.event if device == "mps" else module).Event(enable_timing=True)
    event.record()
    return event


def empty_cache(device: str) -> None:
    """Give the allocator's free memory back to the driver."""
    if device != "cpu":
        _module(device).empty_cache()


def allocated_bytes(device: str) -> int:
    """Return the GPU memory in use by tensors."""
    module = _module(device)
    return int(module.current_allocated_memory() if device == "mps" else module.memory_allocated())


def has_peak(device: str) -> bool:
    """Whether the allocator knows its highest use. MPS's does not."""
    return device in ("cuda", "xpu")


def reset_peak(device: str) -> None:
    """Forget the highest use, where it is counted; on MPS release free memory, so that old pools do not count."""
    module = _module(device)
    if has_peak(device):
        module.reset_peak_memory_stats()
    else:
        module.empty_cache()


def peak_bytes(device: str) -> int:
    """Return the highest use since `reset_peak`; on MPS the size of the driver's pool, which only grows."""
    module = _module(device)
    return int(module.max_memory_allocated() if has_peak(device) else module.driver_allocated_memory())


def _module(device: str) -> Any:
    import torch

    return getattr(torch, device)


class MemoryMeter:
    """Memory of the model and of the call. Create it before loading; call `loaded` after the recipe, `read` last."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = self._now()
        self._model = 0
        self._weights = 0

    def loaded(self, pipe: Any) -> None:
        self._model = self._now()
        self._weights = weights_bytes(pipe)

    def start_peak(self) -> None:
        """Reset the peak, so that it does not include loading and compiling."""
        if self._device != "cpu":
            reset_peak(self._device)
        else:
            reset_resident_peak()

    def read(self) -> Memory:
        return Memory(
            kind=self._kind(),
            before_bytes=self._before,
            model_bytes=self._model,
            peak_bytes=max(self._peak(), self._model),
            weights_bytes=self._weights,
        )

    def _kind(self) -> str:
        if self._device == "cpu":
            return "process resident set"
        return "device memory allocated" if has_peak(self._device) else "device memory given by the driver"

    def _now(self) -> int:
        if self._device != "cpu":
            return allocated_bytes(self._device)
        import psutil

        return int(psutil.Process().memory_info().rss)

    def _peak(self) -> int:
        if self._device != "cpu":
            return peak_bytes(self._device)
        return peak_resident_bytes()


def weights_bytes(pipe: Any) -> int:
    """Return the bytes of all parameters and buffers of the pipeline's components; shared ones count once. Of a storage
    that is used for other data too (a mapped file, pinned memory), only their share counts."""
    spans: dict[int, tuple[int, set[tuple[int, int]]]] = {}
    for component in COMPONENTS:
        module = component_of(pipe, component)
        if module is None:
            continue
        for tensor in [*module.parameters(), *module.buffers()]:
            for part in plain_tensors(tensor):
                storage = part.untyped_storage()
                # By the storage's address: tensors without data (offloaded ones) have no data pointer.
                _, ranges = spans.setdefault(storage._cdata, (storage.nbytes(), set()))
                size = part.element_size()
                ranges.add((part.storage_offset() * size, part.numel() * size))
    return sum(min(whole, sum(size for _, size in ranges)) for whole, ranges in spans.values())


def plain_tensors(tensor: Any) -> list[Any]:
    """Return the plain tensors that a quantised weight (a tensor subclass) consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor, *_bitsandbytes_scales(tensor)]
    names = flatten()[0]
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


def _bitsandbytes_scales(tensor: Any) -> list[Any]:
    """Return the scales that bitsandbytes stores as attributes of a weight, including scales of scales."""
    import torch

    state = getattr(tensor, "quant_state", None)
    second = getattr(state, "state2", None)
    held = [getattr(tensor, "SCB", None), getattr(state, "offset", None)]
    held += [getattr(each, name, None) for each in (state, second) for name in ("absmax", "code")]
    return [part for part in held if isinstance(part, torch.Tensor)]


STAGES = ("text", "encode", "steps", "vae", "other")
"""`encode` only for calls that start from an image."""


class PipelineTimer:
    """Times whole calls, made through `time_call`, and their stages. It is attached once to a pipeline instance.

    The device is synchronised before and after a call. Marks inside it are of the host's clock on CPUs, and device
    events on GPUs, so that marking never waits for the GPU.
    """

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
        vae = getattr(pipe, "vae", None)
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
