"""The hardware and the installation, as techniques see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a technique may ask about the hardware and the installation without importing torch.

    Attributes:
        device: "cuda" or "cpu".
        capability: CUDA's compute capability, None if unknown.
        compiler: path of the C++ compiler, None if there is none.
        has_all_packages: pretend that every optional package is installed, to ask what the hardware alone allows.
        num_gpus: GPUs visible to this process, None if unknown.
    """

    device: str
    device_name: str
    capability: tuple[int, int] | None
    compiler: str | None
    has_all_packages: bool = False
    num_gpus: int | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def has_package(self, name: str) -> bool:
        """Whether a package can be imported. It is not imported; the parent of "parent.child" is."""
        import importlib.util

        if self.has_all_packages:
            return True
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the parent
            return False
