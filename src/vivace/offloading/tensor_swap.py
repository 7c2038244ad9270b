"""Other tensors in the places of a module's, and back again.

A parameter stays the same object and only its data are exchanged, so compiled code goes on being used. Quantised
weights that consist of several tensors are put together anew each time. What shares its data goes on sharing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Make = Callable[[Any], Any]
"""Of a plain tensor another one of its shape and dtype."""


class Exchange:
    """Puts other tensors in the places of a module's: parameters, buffers, and what bitsandbytes hangs on them.

    Args:
        make: what to put in the place of a plain tensor. Asked once for what several places share.
        remembers: whether `undo` will be asked for. Else nothing that was there is held.
    """

    def __init__(self, make: Make, *, remembers: bool) -> None:
        self._make = make
        self._remembers = remembers
        self._made: dict[Any, Any] = {}
        """By where a tensor's data lie: two parameters may be views of one storage."""
        self._objects: dict[int, Any] = {}
        """What was put in a place, by the identity of what was there."""
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._data: list[tuple[Any, Any]] = []
        self._hung: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def of_modules(self, modules: Iterable[Any], which: Callable[[Any], bool] | None = None) -> None:
        """Of all tensors that these modules hold themselves.

        Args:
            which: whether to exchange a parameter, a buffer, or what bitsandbytes hangs on a module (asked with the
                module). None for all.
        """
        with unrecorded():
            modules = list(modules)
            for held, name in places(modules):
                old = held[name]
                if which is not None and not which(old):
                    continue
                if self._remembers:
                    self._places.append((held, name, old))
                if id(old) not in self._objects:
                    self._objects[id(old)] = self._of_tensor(old)
                held[name] = self._objects[id(old)]
            for part in modules:
                if _is_of_bitsandbytes(part) and (which is None or which(part)):
                    self._of_objects(part)

    def undo(self) -> None:
        """What was there is in its places again, whatever has been put there since."""
        import torch

        with unrecorded(), torch._C.DisableTorchFunctionSubclass():
            for tensor, data in self._data:
                tensor.data = data
            for attributes, before in self._hung:
                attributes.clear()
                attributes.update(before)
            for held, name, old in self._places:
                if name in held:
                    held[name] = old

    def _of_tensor(self, old: Any) -> Any:
        """What takes the tensor's place: itself with other data, or another one of its kind."""
        import torch

        if is_plain(old) and not vars(old):  # by far the most
            data = old.data
            old.data = self._once(data)
            if self._remembers:
                self._data.append((old, data))
            return old
        if hasattr(old, "__tensor_flatten__"):
            new = mapped(old, lambda tensor, _: self._once(tensor))
            return (
                torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new
            )
        # Some kinds (GGUF's) else make one of their own of whatever they return.
        with torch._C.DisableTorchFunctionSubclass():
            data = old.data
            old.data = self._once(data)
        if self._remembers:
            self._data.append((old, data))
        self._of_attributes(old)
        return old

    def _of_attributes(self, owner: Any) -> None:
        """Tensors that are attributes of a weight, or of an object of bitsandbytes."""
        import torch

        attributes = vars(owner)
        found = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
        if self._remembers and (found or _is_of_bitsandbytes(owner)):
            self._hung.append((attributes, dict(attributes)))
        attributes.update({name: self._once(tensor) for name, tensor in found.items()})
        self._of_objects(owner)

    def _of_objects(self, owner: Any) -> None:
        """bitsandbytes keeps scales in objects that are attributes of weights, of layers, and of each other."""
        import torch

        for value in list(vars(owner).values()):
            is_state = _is_of_bitsandbytes(value) and not isinstance(value, torch.Tensor | torch.nn.Module)
            if is_state and id(value) not in self._objects:
                self._objects[id(value)] = value
                self._of_attributes(value)

    def _once(self, tensor: Any) -> Any:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._made:
            self._made[key] = self._make(tensor)
        return self._made[key]


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Without gradients, and not in inference mode, though the call may be: its tensors could not be put in the place
    of others."""
    import torch

    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return _unrecorded()
    return contextlib.nullcontext()  # as in most calls, thousands of times in each


def is_plain(tensor: Any) -> bool:
    """Whether it is of no kind of its own."""
    import torch

    return type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor


def mapped(tensor: Any, make: Callable[[Any, Any], Any], strides: tuple[int, ...] | None = None) -> Any:
    """`make` of a tensor and its strides, or the same kind of quantised weight of `make` of each tensor that it holds.

    Those are made without strides.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return make(tensor, strides)
    names, context = flatten()
    inner = {name: mapped(getattr(tensor, name), make) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def unknown_kind(module: Any) -> str | None:
    """The class of a weight that holds other tensors and does not say which, or None."""
    import torch

    for held, name in places(module.modules()):
        kind = type(held[name])
        hides = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if hides and not hasattr(kind, "__tensor_flatten__"):
            return kind.__name__
    return None


def _is_of_bitsandbytes(value: Any) -> bool:
    return type(value).__module__.startswith("bitsandbytes.") and hasattr(value, "__dict__")


def places(modules: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where modules hold a parameter or a buffer of their own: a dict, and the name in it."""
    for part in modules:
        for held in (part._parameters, part._buffers):
            yield from ((held, name) for name, tensor in list(held.items()) if tensor is not None)
