"""PyTorch's CUDA caching allocator, its bookkeeping without a GPU: what a tensor of so many bytes really takes.

`torch.cuda.memory_allocated` counts blocks, not tensors. A block is a multiple of 512 bytes; a large one is not even
split while no more than 1 MiB would be left over. With the two thousand tensors of SDXL that makes 2 % of its weights.

Source: c10/cuda/CUDACachingAllocator.cpp, its default settings (no expandable segments, no maximal split size).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
BLOCK = 512
_SMALL = _MIB
"""Up to this size blocks come from segments of their own kind."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""From this size on a segment is made to measure, rounded to the next."""
_ROUND_SEGMENT = 2 * _MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours there."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    previous: Block | None = None
    next: Block | None = None


class CachingAllocator:
    """Blocks taken and given back, best fit first. Addresses are only names.

    Attributes:
        allocated: bytes of the blocks in use: `torch.cuda.memory_allocated()`.
        reserved: bytes of all segments, used or not: `torch.cuda.memory_reserved()`. Nothing is ever given back to
            the driver, which the real one does when memory runs out.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        # Free blocks by (size, address), small ones and large ones apart.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_address: dict[int, Block] = {}

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least that many bytes; at least one of 512."""
        size = max(BLOCK, -(-num_bytes // BLOCK) * BLOCK)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small) or self._new_segment(size, is_small)
        rest = block.size - size
        if rest >= BLOCK if is_small else rest > _SMALL:
            after = Block(block.address + size, rest, is_small, previous=block, next=block.next)
            if block.next is not None:
                block.next.previous = after
            block.next, block.size = after, size
            self._keep(after)
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back; free neighbours become one."""
        self.allocated -= block.size
        before, after = block.previous, block.next
        if after is not None and after.is_free:
            self._take(after)
            self._join(block, after)
        if before is not None and before.is_free:
            self._take(before)
            self._join(before, block)
            block = before
        self._keep(block)

    def _best_fit(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        block = self._by_address[free[place][1]]
        self._take(block)
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

    def _keep(self, block: Block) -> None:
        block.is_free = True
        self._by_address[block.address] = block
        insort(self._free[block.is_small], (block.size, block.address))

    def _take(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]

    @staticmethod
    def _join(block: Block, after: Block) -> None:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
