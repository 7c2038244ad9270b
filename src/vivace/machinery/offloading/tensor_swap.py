"""Swap a module's tensors for others, and back.

A parameter stays the same object and only its data are swapped, so compiled code stays valid. Quantised weights that
consist of several tensors are rebuilt each time. Tensors that share data go on sharing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Make = Callable[[torch.Tensor], torch.Tensor]
    """Returns another plain tensor of the same shape and dtype."""


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
