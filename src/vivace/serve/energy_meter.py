"""The energy of the GPU while it draws, from the driver's own counter."""

from __future__ import annotations

import contextlib
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
        now = self.read()
        return {} if now is None or before is None else {"energy_j": now - before}
