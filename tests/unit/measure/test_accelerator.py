"""GPUs of other makers: PyTorch's own functions are called, and what they cannot do is refused. No such GPU is here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vivace
from vivace.errors import Unsupported
from vivace.measure import accelerator
from vivace.measure.accelerator import MemoryMeter, PipelineTimer
from vivace.measure.machine import check_works, choose_device, this_machine


class Event:
    """Marks a time, in milliseconds, as the fake GPU counts it."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An Intel and an Apple GPU that count calls; returns the calls."""
    counted: list[str] = []

    def told(name: str, result: Any = None) -> Any:
        def call(*_: Any) -> Any:
            counted.append(name)
            return result

        return call

    names = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "is_available": True}
    sizes = {"memory_allocated": 5, "max_memory_allocated": 9, "device_count": 2}
    xpu = {name: told(f"xpu.{name}", result) for name, result in (names | sizes).items()}
    monkeypatch.setattr(
        torch, "xpu", SimpleNamespace(Event=Event, get_device_name=lambda: "Intel Arc B580", **xpu)
    )
    sizes = {"current_allocated_memory": 5, "driver_allocated_memory": 12}
    mps = {name: told(f"mps.{name}", result) for name, result in (names | sizes).items()}
    monkeypatch.setattr(torch, "mps", SimpleNamespace(event=SimpleNamespace(Event=Event), **mps))
    return counted


def test_auto_takes_the_gpu_that_is_there(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "xpu"
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == "mps"
    with pytest.raises(Unsupported, match="sees no Intel GPU"):
        choose_device("xpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert accelerator.available_gpu() is None
    with pytest.raises(Unsupported, match="sees no Apple GPU"):
        choose_device("mps")


def test_under_rocm_a_capability_is_not_cudas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    machine = this_machine("cuda")
    assert (machine.backend, machine.maker, machine.capability) == ("rocm", "AMD", None)
    assert machine.is_gpu
    assert not machine.is_cuda
    assert machine.captures_graphs


def pipeline() -> Any:
    def decode(latents: Any) -> Any:
        Event.clock += 20
        return latents

    return SimpleNamespace(unet=torch.nn.Linear(2, 2), vae=SimpleNamespace(decode=decode))


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_calls_are_timed_by_the_gpus_own_events(calls: list[str], device: str) -> None:
    pipe = pipeline()
    timer = PipelineTimer(pipe, device)

    def call() -> Any:
        for _ in range(3):
            Event.clock += 10
            pipe.unet(torch.zeros(1, 2))
        Event.clock += 5
        return pipe.vae.decode(torch.zeros(1))

    _, sample = timer.time_call(call, image=0)
    assert calls == [f"{device}.synchronize"] * 2, "before and after, and never inside"
    assert sample.stages_s["steps"] == pytest.approx(0.025), "from the first step to the decoder"
    assert sample.stages_s["vae"] == pytest.approx(0.020)
    assert sample.num_denoiser_calls == 3


@pytest.mark.parametrize(
    ("device", "kind", "peak"),
    [("xpu", "device memory allocated", 9), ("mps", "device memory given by the driver", 12)],
)
def test_memory_is_the_allocators(calls: list[str], device: str, kind: str, peak: int) -> None:
    meter = MemoryMeter(device)
    meter.start_peak()
    memory = meter.read()
    assert (memory.kind, memory.before_bytes, memory.peak_bytes) == (kind, 5, peak)
    assert (f"{device}.reset_peak_memory_stats" in calls) == (device == "xpu"), "MPS knows no peak"


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception, *dtypes: torch.dtype) -> None:
    """Let moves to an Apple GPU fail, in some dtypes or in all; others stay on the CPU."""
    to = torch.Tensor.to

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked = {arg for arg in args if isinstance(arg, torch.dtype)}
        if "mps" not in {str(arg) for arg in args}:
            return to(tensor, *args, **kwargs)
        if not dtypes or asked & set(dtypes):
            raise error
        return to(tensor, *(arg for arg in args if str(arg) != "mps"), **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(accelerator, "is_available", lambda device: True)
    monkeypatch.setattr("vivace.measure.machine.is_available", lambda device: True)


_NOT_LINKED = RuntimeError("PyTorch is not linked with support for mps devices")


def test_a_gpu_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, _NOT_LINKED)
    monkeypatch.setattr("vivace.runtime.pipelines.load_pipeline", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises(Unsupported, match=r"--device mps: .* sees it, and cannot use it \(.*not linked.*cpu"):
        vivace.load("tiny-sd", device="mps")
    check_works("cpu")
