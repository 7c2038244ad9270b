"""Where the time of a step goes on the first of several GPUs, by torch.profiler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vivace
from vivace.errors import StoreError
from vivace.measure.profiling.trace import union
from vivace.models.find import SYNTHETIC

PROFILE_STEPS = 4


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went on the first GPU, milliseconds.

    compute: kernels of its own shard. communication: collectives (NCCL's kernels) beside which nothing was computed,
    each as long as the fastest of its kind; waiting: what they took beyond that, for data that was not there yet or
    because there was more of it. idle: nothing ran. launch: the part of idle in which the CPU was not waiting for the
    GPU, but busy launching what comes next. cpu: what the CPU took from the beginning of a step to that of the next,
    less its waiting for the GPU. Where it is as long as the step, the CPU bounds it, here or in another process; the
    profiler itself adds to it.
    """

    model: str
    recipe: str
    gpus: int
    step: float
    compute: float
    communication: float
    waiting: float
    idle: float
    launch: float
    cpu: float


Span = tuple[str, float, float]
"""A kernel's name, start and end, in one unit of time."""


def where_time_goes(spans: Sequence[Span]) -> tuple[float, float, float, float]:
    """Return compute, communication, waiting and idle time between the first kernel's start and the last one's end.

    Kernels of several streams may run at the same time: time in which anything was computed counts as compute.
    """

    def is_collective(name: str) -> bool:
        return "nccl" in name.lower()

    sent = [span for span in spans if is_collective(span[0])]
    own = union([(start, end) for name, start, end in spans if not is_collective(name)])
    fastest: dict[str, float] = {}
    for name, start, end in sent:
        fastest[name] = min(fastest.get(name, end - start), end - start)
    either = union([(start, end) for _, start, end in spans])
    total = either[-1][1] - either[0][0]
    compute = _length(own)
    bare = _length(either) - compute
    needed = sum(fastest[name] for name, _, _ in sent)
    took = sum(end - start for _, start, end in sent)
    communication = bare * needed / took if took else 0.0
    return compute, communication, bare - communication, total - _length(either)


def launch_bound(spans: Sequence[Span], waits: Sequence[tuple[float, float]]) -> float:
    """Time without a kernel, between the first one's start and the last one's end, in which the CPU did not wait.

    Args:
        waits: when the CPU waited for the GPU.
    """
    ran = union([(start, end) for _, start, end in spans])
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(ran)]
    return _length(gaps) - _shared(gaps, union(waits))


def cpu_a_step(begins: Sequence[float], waits: Sequence[tuple[float, float]]) -> float:
    """From the beginning of a step to that of the next, less the CPU's waiting for the GPU, on average."""
    first, last = min(begins), max(begins)
    waited = _shared([(first, last)], union(waits))
    return (last - first - waited) / max(1, len(begins) - 1)


def _shared(spans: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The length of what two unions have in common."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans for b in other)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def profiled(name: str, recipe: str, gpus: int, device: str) -> Profile:
    """Profile some steps of an image, after the same without the profiler."""
    import gc

    import torch
    from torch.profiler import ProfilerActivity

    with vivace.load(SYNTHETIC + name, recipe, device=device) as session:
        _draw_steps(session)
        _draw_steps(session)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            # The denoiser's steps alone: text encoders come before them, once an image.
            pipe = session.pipe
            denoiser = pipe.unet if getattr(pipe, "unet", None) is not None else pipe.transformer
            hook = denoiser.register_forward_pre_hook(lambda *_: _mark())
            _draw_steps(session)
            hook.remove()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        traced = _traced(profiler)
    del session, pipe, denoiser
    gc.collect()
    return _per_step(name, recipe, gpus, traced)


def _draw_steps(session: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    session("a red circle", num_inference_steps=PROFILE_STEPS, generator=generator, output_type="latent")


def _mark() -> None:
    """A label in the trace at which a step begins."""
    import torch

    with torch.profiler.record_function("vivace step"):
        pass


@dataclass(frozen=True)
class _Traced:
    """kernels: what ran on the GPU since the first step began; begins: of steps; waits: of the CPU for the GPU."""

    kernels: list[Span]
    begins: list[float]
    waits: list[tuple[float, float]]


def _traced(profiler: Any) -> _Traced:
    from torch.autograd import DeviceType

    events = profiler.events()
    # The GPU's own timeline has the same labels.
    begins = [
        event.time_range.start
        for event in events
        if event.name == "vivace step" and event.device_type == DeviceType.CPU
    ]
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation  # labels span the kernels that they are about
        and event.time_range.start >= min(begins)
    ]
    waits = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name.startswith("cuda") and event.name.endswith("Synchronize")
    ]
    return _Traced(kernels, begins, waits)


def _per_step(name: str, recipe: str, gpus: int, traced: _Traced) -> Profile:
    if not traced.kernels:
        raise StoreError("--profile: no kernel of a GPU was seen; it wants a CUDA device")
    compute, communication, waiting, idle = (
        part / 1e3 / PROFILE_STEPS for part in where_time_goes(traced.kernels)
    )
    launch = launch_bound(traced.kernels, traced.waits) / 1e3 / PROFILE_STEPS
    cpu = cpu_a_step(traced.begins, traced.waits) / 1e3
    step = compute + communication + waiting + idle
    return Profile(name, recipe, gpus, step, compute, communication, waiting, idle, launch, cpu)
