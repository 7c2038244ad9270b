"""This process's GPU through NVML: energy, power, clocks, temperature, throttling. Energy is the driver's own counter;
where there is none, the sampled power is integrated, and the record says so."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vivace.foundation.hardware.this_machine import opened_nvml
from vivace.foundation.spec.record import GpuWindow

INTERVAL_S = 0.2
LEAST_WINDOW_S = 1.0
"""Seconds of the shortest window: the counter moves about ten times a second, and a shorter one is off by a few per
cent."""
# NVML's bits of `nvmlDeviceGetCurrentClocksThrottleReasons`. An idle GPU's low clocks are not throttling.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class NvmlReading:
    """One reading. Figures that this GPU does not have are None."""

    at_s: float
    power_w: float | None
    sm_clock_mhz: float | None
    temperature_c: float | None
    throttle_bits: int


class NvmlGpu:
    """One GPU of NVML; open it with `opened_gpu`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read(self) -> NvmlReading:
        nvml = self._nvml
        power = self._get(nvml.nvmlDeviceGetPowerUsage)
        clock = self._get(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        temperature = self._get(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        bits = self._get(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return NvmlReading(
            at_s=time.perf_counter(),
            power_w=None if power is None else power / 1000,
            sm_clock_mhz=clock,
            temperature_c=temperature,
            throttle_bits=int(bits or 0),
        )

    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; None if this GPU does not count them."""
        millijoules = self._get(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1000

    def num_processes(self) -> int | None:
        """Return the number of processes that compute on the GPU."""
        try:
            return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except self._nvml.NVMLError:
            return None

    def identity(self) -> tuple[int | None, str]:
        """Return the GPU's index among all of the host, and its UUID."""
        index = self._get(self._nvml.nvmlDeviceGetIndex)
        return None if index is None else int(index), self._nvml.nvmlDeviceGetUUID(self._handle)

    def _get(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        try:
            return float(function(self._handle, *arguments))
        except self._nvml.NVMLError:  # not on this GPU
            return None


@contextlib.contextmanager
def opened_gpu() -> Iterator[NvmlGpu | str | None]:
    """Open this process's current GPU: yields it, or the reason why NVML cannot read it; None without CUDA. It never
    initialises CUDA."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        yield None
        return
    # By UUID: CUDA_VISIBLE_DEVICES renumbers the GPUs for PyTorch, but not for NVML.
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    with opened_nvml() as nvml:
        gpu: NvmlGpu | str = nvml
        if not isinstance(nvml, str):
            try:
                gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            except nvml.NVMLError as error:
                gpu = str(error)
        yield gpu


class GpuMeter:
    """Observes a GPU over the timed calls: `start`, calls, `stop`, inside a `with`. A second `start` begins anew."""

    def __init__(self, gpu: NvmlGpu | str | None, interval_s: float = INTERVAL_S) -> None:
        self._gpu = gpu
        self._interval_s = interval_s
        self._readings: list[NvmlReading] = []
        self._energy_j: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_thread()

    def start(self) -> None:
        self._end_thread()
        if not isinstance(self._gpu, NvmlGpu):
            return
        self._ended = threading.Event()
        self._readings = [self._gpu.read()]
        self._energy_j = self._gpu.energy_j()
        self._thread = threading.Thread(target=self._sample, args=(self._gpu, self._ended), daemon=True)
        self._thread.start()

    def stop(self, calls: int) -> GpuWindow | None:
        """Return what was observed since `start`; None on a CPU."""
        if isinstance(self._gpu, str):
            return GpuWindow(calls=calls, reason=self._gpu)
        if self._gpu is None:
            return None
        energy_j = self._gpu.energy_j()
        self._end_thread()
        self._readings.append(self._gpu.read())
        return self._window(calls, energy_j)

    def _sample(self, gpu: NvmlGpu, ended: threading.Event) -> None:
        while not ended.wait(self._interval_s):
            self._readings.append(gpu.read())

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _window(self, calls: int, energy_j: float | None) -> GpuWindow:
        readings = self._readings
        seconds = readings[-1].at_s - readings[0].at_s
        power = [(r.at_s, r.power_w) for r in readings if r.power_w is not None]
        clocks = [r.sm_clock_mhz for r in readings if r.sm_clock_mhz is not None]
        temperatures = [r.temperature_c for r in readings if r.temperature_c is not None]
        bits = 0
        for reading in readings:
            bits |= reading.throttle_bits
        joules: float | None = None
        source: str | None = None
        reason = None
        if seconds < LEAST_WINDOW_S:
            reason = f"no energy: the timed calls took {seconds:.2f} s, and it takes {LEAST_WINDOW_S:g} s to tell it"
        elif energy_j is not None and self._energy_j is not None:
            joules, source = energy_j - self._energy_j, "counter"
        elif len(power) > 1:
            joules, source = _integral(power), "sampled power"
        else:
            reason = "no energy: this GPU has neither a counter nor a reading of its power"
        return GpuWindow(
            calls=calls,
            seconds=seconds,
            num_readings=len(readings),
            energy_j=joules,
            energy_from=source,
            power_w=_integral(power) / (power[-1][0] - power[0][0]) if len(power) > 1 else None,
            max_power_w=max((watts for _, watts in power), default=None),
            sm_clock_mhz=statistics.median(clocks) if clocks else None,
            min_sm_clock_mhz=min(clocks, default=None),
            max_temperature_c=max(temperatures, default=None),
            throttled=tuple(name for bit, name in _THROTTLES.items() if bits & bit),
            reason=reason,
        )


def _integral(power: list[tuple[float, float]]) -> float:
    """Return the joules of readings of power, (seconds, watts), by the trapezoidal rule."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(power))
