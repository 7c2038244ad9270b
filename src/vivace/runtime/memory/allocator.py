"""A model of PyTorch's CUDA caching allocator without a GPU: how much memory tensors really take.

`torch.cuda.memory_allocated` counts blocks, not tensors. A block is a multiple of 512 bytes, and a large block is split
only if more than 1 MiB remains. For the two thousand tensors of SDXL this adds 2 % to its weights.

Source: c10/cuda/CUDACachingAllocator.cpp, its default settings (no expandable segments, no maximal split size).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
BLOCK = 512
_SMALL = _MIB
"""Blocks up to this size come from separate, small segments."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""Blocks from this size on get a segment of their size, rounded up to a multiple of _ROUND_SEGMENT."""
_ROUND_SEGMENT = 2 * _MIB


@dataclass(eq=False)
class Block:
    """A block of a segment; `previous` and `next` are its neighbours."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    previous: Block | None = None
    next: Block | None = None


class CachingAllocator:
    """Allocates and frees blocks, best fit first. Addresses are only names.

    Attributes:
        allocated: bytes of all blocks in use, as `torch.cuda.memory_allocated()`.
        reserved: bytes of all segments, as `torch.cuda.memory_reserved()`. Segments are never released to the driver,
            which the real allocator does when memory runs out.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        # Free blocks as (size, address), separately for small and large ones.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_address: dict[int, Block] = {}

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block of at least that many bytes, and at least 512."""
        size = max(BLOCK, -(-num_bytes // BLOCK) * BLOCK)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small) or self._new_segment(size, is_small)
        remainder = block.size - size
        if remainder >= BLOCK if is_small else remainder > _SMALL:
            after = Block(block.address + size, remainder, is_small, previous=block, next=block.next)
            if block.next is not None:
                block.next.previous = after
            block.next, block.size = after, size
            self._add_free(after)
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated -= block.size
        before, after = block.previous, block.next
        if after is not None and after.is_free:
            self._remove_free(after)
            self._merge(block, after)
        if before is not None and before.is_free:
            self._remove_free(before)
            self._merge(before, block)
            block = before
        self._add_free(block)

    def _best_fit(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self._by_address[free[index][1]]
        self._remove_free(block)
        return block

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        block = Block(self.reserved, size, is_small)
        self.reserved += size
        return block

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        self._by_address[block.address] = block
        insort(self._free[block.is_small], (block.size, block.address))

    def _remove_free(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]

    @staticmethod
    def _merge(block: Block, after: Block) -> None:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
