"""A module whose tensors are kept in host memory and copied to the GPU while it works.

Weights do not change while they are used, so nothing is copied back: onloading puts copies on the GPU in the place of
the host tensors, and offloading drops the copies and puts the host tensors back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vivace.machinery.offloading.tensor_swap import TensorSwap, no_autograd, tensor_slots

if TYPE_CHECKING:
    import torch

    Copy = tuple[torch.Tensor, torch.Tensor]
    """A tensor on the device, and the host tensor that it is a copy of."""

_BLOCK = 2**28  # bytes of the largest block, unless a tensor needs more
_ALIGNMENT = 512  # bytes, that of PyTorch's allocator on a GPU
_RESERVED = 16  # 1/16 of the host's memory is never pinned


class PinnedMemory:
    """Copies of tensors in pinned memory, as long as the host has any; `refused` says why it gave no more."""

    def __init__(self, expected_bytes: int) -> None:
        self.num_bytes = 0
        self.refused: str | None = None
        self._expected_bytes = expected_bytes
        self._blocks: list[tuple[torch.Tensor, int]] = []
        """Pinned bytes, and how many of them are in use."""

    @property
    def allocated_bytes(self) -> int:
        return sum(block.numel() for block, _ in self._blocks)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor if it is pinned, else a pinned copy with the same strides, or None if the host refuses."""
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
    """Return pinned bytes; RuntimeError where less than the reserve would be left: such pages cannot be swapped out."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    if memory.available - num_bytes < memory.total // _RESERVED:
        raise RuntimeError(f"{memory.available / 1e9:.1f} GB of the host's memory are free")
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def is_moved_by_hooks(module: torch.nn.Module) -> bool:
    from diffusers.hooks.group_offloading import _is_group_offload_enabled

    return hasattr(module, "_hf_hook") or bool(_is_group_offload_enabled(module))


def write_copies(copies: list[Copy]) -> int:
    with no_autograd():
        for copy, tensor in copies:
            copy.copy_(tensor, non_blocking=True)
    return sum(copy.nbytes for copy, _ in copies)


class OffloadedModule:
    """A module, and whether its tensors, with those of submodules (`recurse`), or some (`which`), are onloaded."""

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        *,
        recurse: bool = True,
        which: Callable[[Any], bool] | None = None,
    ) -> None:
        self.module = module
        self.device = device
        self._recurse = recurse
        self._which = which
        self._swap: TensorSwap | None = None

    @property
    def is_onloaded(self) -> bool:
        return self._swap is not None

    def has(self, which: Callable[[Any], bool]) -> bool:
        return any(which(slots[name]) for slots, name in tensor_slots(self._modules()))

    def move_to_host(self, memory: PinnedMemory | None) -> None:
        """Move the tensors to host memory, pinned as far as granted, each original freed before the next is copied."""

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            copy = memory.pin(tensor) if memory is not None else None
            return copy if copy is not None else tensor.cpu()

        TensorSwap(on_host, reversible=False).swap(self._modules())

    def onload(self) -> int:
        return write_copies(self.allocate())

    def allocate(self) -> list[Copy]:
        """Replace all tensors by uninitialised device tensors; the caller writes the copies."""
        import torch

        copies: list[Copy] = []

        def allocated(tensor: torch.Tensor) -> torch.Tensor:
            if self._is_on_device(tensor):
                return tensor  # the user moved it
            copies.append((torch.empty_like(tensor, device=self.device), tensor))
            return copies[-1][0]

        self._swap = TensorSwap(allocated, reversible=True)
        try:
            self._swap.swap(self._modules(), self._which)
        except BaseException:  # out of memory, mostly
            self.restore()
            raise
        return copies

    def offload(self) -> None:
        """Put the host tensors back and drop the copies. Does nothing if the module is not onloaded."""
        if self.is_onloaded:
            self.restore()
            self.offload_added()

    def restore(self) -> None:
        """Like `offload`, but tensors added while the module was onloaded stay on the device."""
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.undo()

    def offload_added(self) -> None:
        """Move tensors added while the module was onloaded (an adapter, a buffer) to host memory."""
        if self.has(self._is_on_device):
            self.move_to_host(None)

    def offload_if_moved(self) -> None:
        """Offload after the user moved the onloaded module to another device."""
        tensors = (slots[name] for slots, name in tensor_slots(self._modules()))
        if self.is_onloaded and self.device.type != "cpu" and not any(self._is_on_device(t) for t in tensors):
            self.offload()

    def _modules(self) -> Iterable[torch.nn.Module]:
        return self.module.modules() if self._recurse else (self.module,)

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.device.type == self.device.type != "cpu")
