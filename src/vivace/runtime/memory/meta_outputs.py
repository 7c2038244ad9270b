"""The outputs of operations on meta tensors, remembered by the metadata of their inputs.

PyTorch computes the shape, strides and dtype of an output in Python, by its reference implementations: 0.1 to 5 ms an
operation, so seconds for a large denoiser. Its blocks repeat the same few operations, so here each is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_MAX_ENTRIES = 50_000
_SIMPLE = frozenset({int, float, bool, str, type(None)})

_Layout = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and dtype of a tensor with its own storage."""


class MetaOutputs:
    """Calls operations on meta tensors, and makes the outputs of known calls itself."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Layout | tuple[_Layout, ...]] = {}
        self._makes_outputs: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func(*args, **kwargs)`, for an operator overload such as aten.add.Tensor."""
        if not self._only_makes_outputs(func):
            return func(*args, **kwargs)
        key = _key_of((func, args, tuple(kwargs.items())))
        if key is None:
            return func(*args, **kwargs)
        output = self._known.get(key)
        if output is not None:
            return _make(output)
        result = func(*args, **kwargs)
        layouts = None if _shares_storage(result, (args, kwargs)) else _layouts_of(result)
        if layouts is not None and len(self._known) < _MAX_ENTRIES:
            self._known[key] = layouts
        return result

    def _only_makes_outputs(self, func: Any) -> bool:
        """Whether an operator declares that it neither writes to its inputs nor returns views of them."""
        if func not in self._makes_outputs:
            schema = func._schema
            self._makes_outputs[func] = all(
                value.alias_info is None for value in (*schema.arguments, *schema.returns)
            )
        return self._makes_outputs[func]


def _key_of(value: Any) -> Hashable | None:
    """Return the inputs that decide the outputs' layout; None if unknown.

    Scalars are not remembered: whether one represents a Python number, which decides type promotion, cannot
    be read.
    """
    import torch

    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value)  # 1, 1.0 and True are equal
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or value.dim() == 0:
            return None
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        keys = []
        for item in value:
            key = _key_of(item)
            if key is None:
                return None
            keys.append(key)
        return tuple(keys)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format) or callable(value):
        return (value,)
    return None


def _shares_storage(result: Any, inputs: Any) -> bool:
    """Whether an output is a view of an input although the operator does not declare it, as aten._unsafe_view."""
    import torch
    from torch.utils._pytree import tree_leaves

    def storages(value: Any) -> set[int]:
        return {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)
        }

    return not storages(result).isdisjoint(storages(inputs))


def _layouts_of(result: Any) -> _Layout | tuple[_Layout, ...] | None:
    """Return the layouts of an operation's outputs; None if they cannot be made by `_make`."""
    import torch

    if isinstance(result, torch.Tensor):
        layout = (tuple(result.shape), tuple(result.stride()), result.dtype)
        is_plain = type(result) is torch.Tensor and result.device.type == "meta"
        is_whole = is_plain and _make(layout).untyped_storage().nbytes() == result.untyped_storage().nbytes()
        return layout if is_whole and result.storage_offset() == 0 else None
    if isinstance(result, tuple) and result and all(isinstance(item, torch.Tensor) for item in result):
        if len({item.untyped_storage()._cdata for item in result}) < len(result):
            return None
        layouts = [_layouts_of(item) for item in result]
        return None if None in layouts else tuple(layouts)  # type: ignore[arg-type]
    return None


def _make(layouts: Any) -> Any:
    import torch

    if isinstance(layouts[-1], torch.dtype):
        shape, strides, dtype = layouts
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(_make(layout) for layout in layouts)
