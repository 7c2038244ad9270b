"""The energy of the GPU while it draws, from the driver's own counter."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vivace.measure.nvml import NvmlGpu, opened_gpu


@dataclass(frozen=True)
class EnergyMeter:
    """Reads the counter of this process's GPU, which moves about ten times a second.

    An image of a tenth of a second may therefore read as nothing or as twice its energy; their sum is right.

    Attributes:
        gpu: None on a CPU, and where NVML cannot read the GPU or it counts no energy.
    """

    gpu: NvmlGpu | None = None

    @classmethod
    def of_this_process(cls) -> EnergyMeter:
        """Open the GPU for as long as the process lives; called once CUDA is in use."""
        gpu = contextlib.ExitStack().enter_context(opened_gpu())
        return cls(gpu if isinstance(gpu, NvmlGpu) and gpu.energy_j() is not None else None)

    def read(self) -> float | None:
        """Return the joules since the driver was loaded."""
        return None if self.gpu is None else self.gpu.energy_j()

    def since(self, before: float | None) -> dict[str, float]:
        """Return the joules since a reading, as a field of an event; nothing where there are none."""
        return _joules(before, self.read())


class RunningEnergy:
    """The energy of calls, the next of which may begin before the last has ended.

    The driver is asked in a thread: it takes milliseconds, for which the GPU would wait.
    """

    def __init__(self, meter: EnergyMeter = EnergyMeter()) -> None:
        self._meter = meter
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="energy")
        self._lock = threading.Lock()
        self._running = 0
        self._before: Future[float | None] | None = None

    def begin(self) -> None:
        """Note that a call begins."""
        with self._lock:
            self._running += 1
            if self._running == 1 and self._meter.gpu is not None:
                self._before = self._reader.submit(self._meter.read)

    def end(self) -> Callable[[], dict[str, float]]:
        """Note that a call has ended; return what waits for its joules, as a field of an event."""
        with self._lock:
            self._running -= 1
            before = self._before
            if before is None:
                return dict
            after = self._before = self._reader.submit(self._meter.read)
        return lambda: _joules(before.result(), after.result())

    def drop(self) -> None:
        """Note that a call gave nothing."""
        with self._lock:
            self._running -= 1


def _joules(before: float | None, after: float | None) -> dict[str, float]:
    return {} if before is None or after is None else {"energy_j": after - before}
