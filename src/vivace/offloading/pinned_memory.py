"""The host's memory that a GPU reads by itself: page-locked, so that a copy is one transfer, and nobody waits for it.

PyTorch rounds each page-locked allocation up to a power of two, which can be twice what was asked for. So it is asked
for few large pieces of just such sizes, and tensors lie in them one behind the other.
"""

from __future__ import annotations

from typing import Any

_PIECE = 2**28  # bytes: the most that the last tensor's original still takes beside its copy
_ALIGNED = 512  # bytes, as PyTorch's allocator aligns tensors on a GPU
_LEFT_TO_OTHERS = 16  # the part of the host's memory, 1/16, that is never locked


class PageLocked:
    """Copies of tensors in page-locked memory, as long as the host has any.

    Args:
        wanted: bytes that will be asked for in all, by which the sizes of the pieces are chosen.

    Attributes:
        num_bytes: of the tensors that lie there.
        refused: why the host gave no more, or None.
    """

    def __init__(self, wanted: int) -> None:
        self.num_bytes = 0
        self.refused: str | None = None
        self._wanted = wanted
        self._pieces: list[tuple[Any, int]] = []
        """Bytes of the host's memory, and how many of them are taken."""

    @property
    def allocated_bytes(self) -> int:
        """What was locked, the gaps between tensors included."""
        return sum(piece.numel() for piece, _ in self._pieces)

    def take(self, tensor: Any) -> Any:
        """The tensor if it is locked already, else a copy with the same strides, or None where the host refuses.

        Args:
            tensor: plain, on any device.
        """
        import torch

        if tensor.is_pinned():
            self.num_bytes += tensor.numel() * tensor.element_size()
            return tensor
        if not tensor.numel():
            return None
        room = self._room(tensor.numel() * tensor.element_size())
        if room is None:
            return None
        like = torch.empty_like(tensor, device="meta")  # whose strides leave no gaps
        copy = room.view(tensor.dtype).as_strided(like.shape, like.stride())
        copy.copy_(tensor)
        self.num_bytes += room.numel()
        return copy

    def _room(self, num_bytes: int) -> Any:
        """That many bytes as a tensor, or None."""
        taken = -(-num_bytes // _ALIGNED) * _ALIGNED
        for place, (piece, used) in enumerate(self._pieces):
            if piece.numel() - used >= taken:
                self._pieces[place] = (piece, used + taken)
                return piece[used : used + num_bytes]
        if self.refused is not None:
            return None
        rest = max(0, self._wanted - self.num_bytes)
        size = max(1 << (taken - 1).bit_length(), min(_PIECE, 1 << rest.bit_length() >> 1))
        try:
            piece = _lock(size)
        except RuntimeError as error:  # CUDA's, of which PyTorch makes one of many lines
            self.refused = str(error).strip().splitlines()[0]
            return None
        self._pieces.append((piece, taken))
        return piece[:num_bytes]


def _lock(num_bytes: int) -> Any:
    """Raises:
    RuntimeError: the host has no more, or what is left is for others: an operating system without pages to move
        kills processes.
    """
    import psutil
    import torch

    memory = psutil.virtual_memory()
    if memory.available - num_bytes < memory.total // _LEFT_TO_OTHERS:
        raise RuntimeError(f"{memory.available / 1e9:.1f} GB of the host's memory are free")
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
