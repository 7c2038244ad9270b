"""Which GPUs a machine has, by a driver that the test plays."""

import ctypes
from typing import Any

import pytest

from vivace.foundation.hardware.this_machine import gpu_uuids

UUIDS = ["GPU-11111111-0000-0000-0000-000000000000", "GPU-22222222-0000-0000-0000-000000000000"]


class Driver:
    """NVML of a machine with two GPUs."""

    def __init__(self, is_divided: bool = False, failing: str = "") -> None:
        self.is_divided, self.failing = is_divided, failing

    def __getattr__(self, name: str) -> Any:
        if name == self.failing:
            return lambda *_: 999
        functions = {
            "nvmlInit_v2": lambda: 0,
            "nvmlShutdown": lambda: 0,
            "nvmlDeviceGetCount_v2": lambda count: self.put(count, 2),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: self.put(handle, index.value + 1),
            "nvmlDeviceGetUUID": self.uuid,
            "nvmlDeviceGetMigMode": lambda handle, current, pending: self.put(current, int(self.is_divided)),
        }
        if name not in functions:
            raise AttributeError(name)
        return functions[name]

    def put(self, reference: Any, value: int) -> int:
        reference._obj.value = value
        return 0

    def uuid(self, handle: Any, text: Any, size: Any) -> int:
        text.value = UUIDS[handle.value - 1].encode()
        return 0


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_driver_says_which_gpus_there_are() -> None:
    assert gpu_uuids(lambda name: Driver()) == tuple(UUIDS)


@pytest.mark.parametrize(
    "driver",
    [
        Driver(is_divided=True),
        Driver(failing="nvmlInit_v2"),
        Driver(failing="nvmlDeviceGetCount_v2"),
        Driver(failing="nvmlDeviceGetUUID"),
        object(),
    ],
)
def test_where_it_cannot_be_told_pytorch_is_asked(driver: Any) -> None:
    assert gpu_uuids(lambda name: driver) == ()


def test_a_gpu_that_cannot_be_divided_counts() -> None:
    assert gpu_uuids(lambda name: Driver(failing="nvmlDeviceGetMigMode")) == tuple(UUIDS)


def test_what_a_variable_hides_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_uuids(lambda name: Driver()) == ()


def test_without_a_driver_there_is_none() -> None:
    assert gpu_uuids(lambda name: ctypes.CDLL("libno-such-driver.so.1")) == ()
