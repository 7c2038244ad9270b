"""Energy and the GPU's state, from a driver that the test plays."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from vivace.measure import nvml as module
from vivace.measure.nvml import GpuMeter, NvmlGpu, opened_gpu


class Refused(Exception):
    pass


class Driver:
    """NVML as the meter sees it: 400 W, 100 J a reading of the counter; `without` names functions that fail."""

    NVMLError = Refused
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *without: str, watts: tuple[float, ...] = (400.0,), bits: int = 0) -> None:
        self._without = without
        self._watts = itertools.cycle(watts)
        self._bits = bits
        self._joules = itertools.count(5_000.0, 100.0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[[], Any]] = {
            "nvmlDeviceGetPowerUsage": lambda: 1000 * next(self._watts),
            "nvmlDeviceGetClockInfo": lambda: 1755,
            "nvmlDeviceGetTemperature": lambda: 61,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self._bits,
            "nvmlDeviceGetTotalEnergyConsumption": lambda: 1000 * next(self._joules),
            "nvmlDeviceGetUUID": lambda: "GPU-1234",
            "nvmlDeviceGetIndex": lambda: 3,
            "nvmlDeviceGetComputeRunningProcesses": lambda: ["this"],
        }

        def answer(handle: object, *_: Any) -> Any:
            if name in self._without:
                raise Refused("Not Supported")
            return answers[name]()

        return answer


def window(driver: Driver, monkeypatch: pytest.MonkeyPatch, calls: int = 4) -> Any:
    monkeypatch.setattr(module, "LEAST_WINDOW_S", 0.01)
    with GpuMeter(NvmlGpu(driver, object()), interval_s=0.005) as meter:
        meter.start()
        time.sleep(0.05)
        return meter.stop(calls)


def test_energy_is_the_drivers_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = window(Driver(bits=0x4 | 0x1 | 0x40), monkeypatch)
    assert (found.energy_j, found.energy_from, found.reason) == (100.0, "counter", None)
    assert found.num_readings > 2, "the thread reads between the calls"
    assert found.power_w == pytest.approx(400)
    assert (found.sm_clock_mhz, found.max_temperature_c) == (1755, 61)
    assert found.throttled == ("power cap", "temperature (hardware)"), "idle is no throttling"


def test_without_a_counter_the_power_is_integrated_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = window(Driver("nvmlDeviceGetTotalEnergyConsumption"), monkeypatch)
    assert found.energy_from == "sampled power"
    assert found.energy_j == pytest.approx(400 * found.seconds)


def test_the_gpu_is_named_by_its_number_and_uuid() -> None:
    assert NvmlGpu(Driver(), object()).identity() == (3, "GPU-1234")
    assert NvmlGpu(Driver("nvmlDeviceGetIndex"), object()).identity() == (None, "GPU-1234")


def test_a_cpu_has_no_window() -> None:
    with opened_gpu() as gpu, GpuMeter(None) as meter:
        assert gpu is None, "CUDA is not initialised here, and looking does not do it"
        meter.start()
        assert meter.stop(3) is None
    with GpuMeter("nvidia-ml-py is not installed") as meter:
        meter.start()
        found = meter.stop(3)
    assert found is not None
    assert found.reason == "nvidia-ml-py is not installed"
