"""Pinned host memory, from which the GPU copies in one transfer without blocking the CPU.

PyTorch rounds each pinned allocation up to a power of two, which can double it. So a few large blocks of such sizes are
allocated, and tensors are placed in them one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BLOCK = 2**28  # bytes of the largest block, unless a tensor needs more
_ALIGNMENT = 512  # bytes, that of PyTorch's allocator on a GPU
_RESERVED = 16  # 1/16 of the host's memory is never pinned


class PinnedMemory:
    """Copies of tensors in pinned memory, as long as the host has any.

    Args:
        expected_bytes: bytes expected in total, which decide the sizes of the blocks.

    Attributes:
        num_bytes: bytes of the tensors in pinned memory.
        refused: why the host gave no more, or None.
    """

    def __init__(self, expected_bytes: int) -> None:
        self.num_bytes = 0
        self.refused: str | None = None
        self._expected_bytes = expected_bytes
        self._blocks: list[tuple[torch.Tensor, int]] = []
        """Pinned bytes, and how many of them are in use."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes that were pinned, gaps between tensors included."""
        return sum(block.numel() for block, _ in self._blocks)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor if it is pinned, else a pinned copy with the same strides, or None if the host refuses.

        Args:
            tensor: plain, on any device.
        """
        import torch

        if tensor.is_pinned():
            self.num_bytes += tensor.numel() * tensor.element_size()
            return tensor
        if not tensor.numel():
            return None
        memory = self._allocate(tensor.numel() * tensor.element_size())
        if memory is None:
            return None
        dense = torch.empty_like(tensor, device="meta")  # strides without gaps
        copy = memory.view(tensor.dtype).as_strided(dense.shape, dense.stride())
        copy.copy_(tensor)
        self.num_bytes += memory.numel()
        return copy

    def _allocate(self, num_bytes: int) -> torch.Tensor | None:
        aligned = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for index, (block, used) in enumerate(self._blocks):
            if block.numel() - used >= aligned:
                self._blocks[index] = (block, used + aligned)
                return block[used : used + num_bytes]
        if self.refused is not None:
            return None
        remainder = max(0, self._expected_bytes - self.num_bytes)
        size = max(1 << (aligned - 1).bit_length(), min(_BLOCK, 1 << remainder.bit_length() >> 1))
        try:
            block = _allocate_pinned(size)
        except RuntimeError as error:  # CUDA's has many lines
            self.refused = str(error).strip().splitlines()[0]
            return None
        self._blocks.append((block, aligned))
        return block[:num_bytes]


def _allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Return a block of pinned bytes.

    Raises:
        RuntimeError: the host has no more, or less than the reserve would be left: a system whose pages cannot be
            swapped out kills processes.
    """
    import psutil
    import torch

    memory = psutil.virtual_memory()
    if memory.available - num_bytes < memory.total // _RESERVED:
        raise RuntimeError(f"{memory.available / 1e9:.1f} GB of the host's memory are free")
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
