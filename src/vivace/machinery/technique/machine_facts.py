"""The hardware and the installed packages, for techniques."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
"""The backend of PyTorch: a CPU, NVIDIA's CUDA, AMD's ROCm, Intel's XPU, Apple's MPS."""
MAKERS: dict[Backend, str] = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}


@dataclass(frozen=True)
class Machine:
    """The hardware and the installation, for techniques, without importing torch.

    Attributes:
        device: torch's type of device: "cpu", "cuda" (AMD's GPUs too, under ROCm), "xpu" or "mps".
        capability: CUDA's compute capability; None if unknown, and on all but NVIDIA's GPUs.
        compiler: path of the C++ compiler, None if there is none.
        has_all_packages: pretend that every optional package is installed, to ask what the hardware alone allows.
        num_gpus: GPUs visible to this process, None if unknown.
        is_rocm: PyTorch was built for AMD's GPUs.
    """

    device: str
    device_name: str
    capability: tuple[int, int] | None
    compiler: str | None
    has_all_packages: bool = False
    num_gpus: int | None = None
    is_rocm: bool = False

    @property
    def backend(self) -> Backend:
        match self.device:
            case "cuda":
                return "rocm" if self.is_rocm else "cuda"
            case "xpu" | "mps":
                return self.device
        return "cpu"

    @property
    def maker(self) -> str:
        """The maker of the GPU; "" on a CPU."""
        return MAKERS.get(self.backend, "")

    @property
    def is_gpu(self) -> bool:
        return self.backend != "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU. An AMD GPU's device is called "cuda", too."""
        return self.backend == "cuda"

    @property
    def captures_graphs(self) -> bool:
        """Whether PyTorch can capture graphs: CUDA's, or HIP's through the same functions."""
        return self.backend in ("cuda", "rocm")

    def has_package(self, name: str) -> bool:
        """Whether a package can be imported. It is not imported; the parent of "parent.child" is."""
        import importlib.util

        if self.has_all_packages:
            return True
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the parent
            return False
