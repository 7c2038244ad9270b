"""Which GPUs a machine has, by a driver that the test plays."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vivace.foundation.hardware.this_machine import gpu_index, gpu_uuids, opened_nvml, present_gpu

UUIDS = ["GPU-11111111-0000-0000-0000-000000000000", "GPU-22222222-0000-0000-0000-000000000000"]


class Refused(Exception):
    pass


class Pynvml:
    """The module pynvml on a machine with two H100; `failing` is a function that the driver refuses."""

    NVMLError = Refused

    def __init__(self, is_divided: bool = False, failing: str = "") -> None:
        self._is_divided, self._failing = is_divided, failing

    def __getattr__(self, name: str) -> Any:
        if name == self._failing:
            raise Refused(f"{name}: Not Supported")
        functions = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": UUIDS.index,
            "nvmlDeviceGetIndex": lambda handle: handle,
            "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
            "nvmlDeviceGetName": lambda handle: f"NVIDIA H100 {handle}",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80, free=79),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetMigMode": lambda handle: (int(self._is_divided), 0),
        }
        if name not in functions:
            raise AttributeError(name)
        return functions[name]


def play(monkeypatch: pytest.MonkeyPatch, driver: Pynvml | None, visible: str | None = None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(("visible", "name"), [(None, "0"), ("1", "1"), (UUIDS[1], "1")])
def test_the_first_visible_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str
) -> None:
    play(monkeypatch, Pynvml(), visible)
    gpu = present_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.capability) == (f"NVIDIA H100 {name}", 80, (9, 0))


def test_gpus_have_their_numbers_and_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Pynvml(failing="nvmlDeviceGetMigMode"))
    assert gpu_uuids() == tuple(UUIDS), "a GPU that cannot be divided counts"
    assert gpu_index(UUIDS[1]) == 1


@pytest.mark.parametrize(
    ("driver", "visible"),
    [
        (None, None),
        (Pynvml(failing="nvmlInit"), None),
        (Pynvml(failing="nvmlDeviceGetUUID"), None),
        (Pynvml(is_divided=True), None),
        (Pynvml(), "1"),
    ],
)
def test_where_it_cannot_be_told_pytorch_is_asked(
    monkeypatch: pytest.MonkeyPatch, driver: Pynvml | None, visible: str | None
) -> None:
    play(monkeypatch, driver, visible)
    assert gpu_uuids() == ()


@pytest.mark.parametrize(
    ("driver", "visible"),
    [(None, None), (Pynvml(failing="nvmlInit"), None), (Pynvml(), ""), (Pynvml(), "-1")],
)
def test_a_machine_without_nvidia_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: Pynvml | None, visible: str | None
) -> None:
    play(monkeypatch, driver, visible)
    assert present_gpu() is None


def test_a_record_says_why_there_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, None)
    with opened_nvml() as nvml:
        assert "pip install nvidia-ml-py" in nvml
    play(monkeypatch, Pynvml(failing="nvmlInit"))
    with opened_nvml() as nvml:
        assert "Not Supported" in nvml
