"""A GPU's data sheet."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIGABYTE = 10**9
_SHARED_MEMORY = {
    (6, 1): 49_152,
    (7, 0): 98_304,
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
}
"""Bytes that a block of threads may have, by compute capability: the CUDA C++ Programming Guide's tables, less the 1 KB
that CUDA reserves per block."""


def shared_memory_bytes(capability: tuple[int, int]) -> int | None:
    """Return the shared memory that one block of threads can have; None for a chip that is not known."""
    return _SHARED_MEMORY.get(capability)


@dataclass(frozen=True)
class Chip:
    """One model of NVIDIA's GPUs.

    Attributes:
        name: as NVIDIA's data sheets have it, without "NVIDIA" and "GeForce".
        architecture: e.g. "Hopper".
        capability: CUDA's compute capability.
        memory_gb: the sizes that it is sold with, the usual one first. A GPU of N GB has at least N * 10**9 bytes.
        bandwidth_gb_s: of its memory, GB/s; the fastest variant's.
        half: dense TFLOP/s of fp16 or bf16, with fp16 accumulation where that is faster: no program is faster.
        bf16: dense TFLOP/s with fp32 accumulation, as PyTorch multiplies.
        eight: the faster of fp8 and int8, dense, TFLOP/s or TOP/s; that of 16 bits where the chip has neither.
        aliases: other names that people write.
        is_laptop: the chip of laptops, which is another one than the desktop's of the same number.
        other_gb: sizes that its name may have and that are not its own memory's.
    """

    name: str
    architecture: str
    capability: tuple[int, int]
    memory_gb: tuple[float, ...]
    bandwidth_gb_s: float
    half: float
    bf16: float
    eight: float
    aliases: tuple[str, ...] = ()
    is_laptop: bool = False
    other_gb: tuple[float, ...] = ()

    @property
    def sizes(self) -> str:
        """The sizes that it is sold with, in words."""
        return " or ".join(f"{size:g}" for size in sorted(self.memory_gb))

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies in bf16; PyTorch computes in fp32 where it does not."""
        return self.capability >= (8, 0)

    @property
    def as_of_bf16(self) -> Chip:
        """This chip with the rates of a model in bf16: before Ampere that of fp32, an eighth of the tensor cores'."""
        if self.has_bf16:
            return self
        has_tensor_cores = self.capability >= (7, 0) and not self.name.startswith("GTX")
        return replace(self, bf16=self.half / 8) if has_tensor_cores else self

    @property
    def four(self) -> float:
        """The rate of fp4 or int4, dense, TFLOP/s or TOP/s; that of 8 bits where the chip has neither. int4 is in the
        tensor cores from Turing to Ada, and fp4 in Blackwell's: twice 8 bits, and on B300 three times."""
        if self.capability == (10, 3):
            return 3 * self.eight
        return self.eight * (2 if self.architecture in ("Turing", "Ampere", "Ada", "Blackwell") else 1)


@dataclass(frozen=True)
class Gpu:
    """A GPU that a user named: a chip, with its memory.

    Attributes:
        stated_gb: the memory that the name states; None if it states none.
    """

    chip: Chip
    stated_gb: float | None = None

    @property
    def name(self) -> str:
        """The chip's name, with the memory where it is sold with several sizes and the name says which."""
        if self.stated_gb is None or self.chip.memory_gb == (self.stated_gb,):
            return self.chip.name
        return f"{self.chip.name} {self.stated_gb:g}GB"

    @property
    def memory_bytes(self) -> int:
        """Its memory; the usual size, where it is sold with several and the name does not say which."""
        return round((self.stated_gb or self.chip.memory_gb[0]) * GIGABYTE)

    @property
    def is_size_assumed(self) -> bool:
        """Whether it is sold with several sizes, and the name does not say which."""
        return self.stated_gb is None and len(self.chip.memory_gb) > 1

    def within(self, max_bytes: float | None) -> Gpu:
        """Return the GPU that a limit on memory means, where the name does not say which of several sizes it has. A
        limit that is one of the sizes chooses it, and one above the usual size the next that holds it."""
        if max_bytes is None or not self.is_size_assumed:
            return self
        for size in sorted(self.chip.memory_gb):
            if abs(max_bytes / (size * GIGABYTE) - 1) < 0.001 or max_bytes == size * 2**30:
                return replace(self, stated_gb=size)
        if max_bytes <= self.memory_bytes:
            return self
        larger = [size for size in self.chip.memory_gb if size * GIGABYTE >= max_bytes]
        return replace(self, stated_gb=min(larger, default=max(self.chip.memory_gb)))
