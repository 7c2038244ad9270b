"""A module whose tensors are kept in host memory and copied to the GPU while it works.

Weights do not change while they are used, so nothing is copied back: onloading puts copies on the GPU in the place of
the host tensors, and offloading drops the copies and puts the host tensors back.

A parameter stays the same object and only its data are swapped, so compiled code stays valid. Quantised weights that
consist of several tensors are rebuilt each time. Tensors that share data go on sharing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Copy = tuple[torch.Tensor, torch.Tensor]
    """A tensor on the device, and the host tensor that it is a copy of."""
    Make = Callable[[torch.Tensor], torch.Tensor]
    """Returns another plain tensor of the same shape and dtype."""

_BLOCK = 2**28  # bytes of the largest block, unless a tensor needs more
_ALIGNMENT = 512  # bytes, that of PyTorch's allocator on a GPU
_RESERVED = 16  # 1/16 of the host's memory is never pinned


class TensorSwap:
    """Swaps a module's parameters, its buffers, and the tensors that bitsandbytes stores in attributes.

    `make` is called once for tensors that share data. Unless it is `reversible`, no original is kept for `undo`.
    """

    def __init__(self, make: Make, *, reversible: bool) -> None:
        self._make = make
        self._reversible = reversible
        self._made: dict[Any, torch.Tensor] = {}
        """Replacements by the address of a tensor's data: two parameters may be views of one storage."""
        self._replacements: dict[int, Any] = {}
        """Replacements by the id of the original."""
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def swap(self, modules: Iterable[torch.nn.Module], which: Callable[[Any], bool] | None = None) -> None:
        """Swap all direct tensors of these modules, or those that `which` selects; of bitsandbytes' it gets the
        module."""
        with no_autograd():
            modules = list(modules)
            for slots, name in tensor_slots(modules):
                old = slots[name]
                if which is not None and not which(old):
                    continue
                if self._reversible:
                    self._slots.append((slots, name, old))
                if id(old) not in self._replacements:
                    self._replacements[id(old)] = self._swap_tensor(old)
                slots[name] = self._replacements[id(old)]
            for module in modules:
                if _is_of_bitsandbytes(module) and (which is None or which(module)):
                    self._swap_states(module)

    def undo(self) -> None:
        """Put the original tensors back, whatever has replaced them since."""
        import torch

        with no_autograd(), torch._C.DisableTorchFunctionSubclass():
            for tensor, data in self._data:
                tensor.data = data
            for attributes, before in self._attributes:
                attributes.clear()
                attributes.update(before)
            for slots, name, old in self._slots:
                if name in slots:
                    slots[name] = old

    def _swap_tensor(self, old: torch.Tensor) -> torch.Tensor:
        import torch

        if is_plain(old) and not vars(old):  # by far the most
            data = old.data
            old.data = self._made_once(data)
            if self._reversible:
                self._data.append((old, data))
            return old
        if hasattr(old, "__tensor_flatten__"):
            new = map_tensors(old, lambda tensor, _: self._made_once(tensor))
            return (
                torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new
            )
        # Otherwise some classes (GGUF's) wrap whatever they return.
        with torch._C.DisableTorchFunctionSubclass():
            data = old.data
            old.data = self._made_once(data)
        if self._reversible:
            self._data.append((old, data))
        self._swap_attributes(old)
        return old

    def _swap_attributes(self, owner: Any) -> None:
        import torch

        attributes = vars(owner)
        tensors = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
        if self._reversible and (tensors or _is_of_bitsandbytes(owner)):
            self._attributes.append((attributes, dict(attributes)))
        attributes.update({name: self._made_once(tensor) for name, tensor in tensors.items()})
        self._swap_states(owner)

    def _swap_states(self, owner: Any) -> None:
        """Swap tensors of bitsandbytes' states, which hold scales, and are attributes of weights, layers and each
        other."""
        import torch

        for value in list(vars(owner).values()):
            is_state = _is_of_bitsandbytes(value) and not isinstance(value, torch.Tensor | torch.nn.Module)
            if is_state and id(value) not in self._replacements:
                self._replacements[id(value)] = value
                self._swap_attributes(value)

    def _made_once(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._made:
            self._made[key] = self._make(tensor)
        return self._made[key]


@contextlib.contextmanager
def _no_autograd() -> Iterator[None]:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def no_autograd() -> contextlib.AbstractContextManager[None]:
    """Disable gradients and inference mode: tensors made in inference mode cannot replace others."""
    import torch

    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return _no_autograd()
    return contextlib.nullcontext()  # as in most calls, thousands of times in each


def is_plain(tensor: Any) -> bool:
    import torch

    return type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor


def map_tensors(tensor: Any, make: Callable[[Any, Any], Any], strides: tuple[int, ...] | None = None) -> Any:
    """Return `make(tensor, strides)`, or a quantised weight of mapped inner tensors (`make` gets no strides)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return make(tensor, strides)
    names, context = flatten()
    inner = {name: map_tensors(getattr(tensor, name), make) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def opaque_weight_class(module: torch.nn.Module) -> str | None:
    """Return the class of a weight that wraps other tensors without listing them, or None."""
    import torch

    for slots, name in tensor_slots(module.modules()):
        kind = type(slots[name])
        is_wrapper = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if is_wrapper and not hasattr(kind, "__tensor_flatten__"):
            return kind.__name__
    return None


def _is_of_bitsandbytes(value: Any) -> bool:
    return type(value).__module__.startswith("bitsandbytes.") and hasattr(value, "__dict__")


def tensor_slots(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each module's direct parameters and buffers as the dict that holds it and its name there."""
    for module in modules:
        for slots in (module._parameters, module._buffers):
            yield from ((slots, name) for name, tensor in list(slots.items()) if tensor is not None)


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
