"""Tensors that remember their origin among a file's tensors, through any operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class TensorTrace:
    """Follows a file's tensors through functions that rename, split, join and scale them.

    Attributes:
        read: names of tensors that were read as numbers.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return tensors that are traced."""
        kind = _kind()
        followed = {}
        for name, tensor in tensors.items():
            own: Any = tensor.as_subclass(kind)
            own.sources, own.trace = frozenset((name,)), self
            followed[name] = own
        return followed

    def used(self, outputs: Iterable[Any]) -> set[str]:
        """Return the names of the file's tensors that went into these, or were read as numbers."""
        return self.read.union(*(getattr(output, "sources", ()) for output in outputs))


def _kind() -> Any:
    import torch

    class Traced(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            traced = [value for value in _leaves((args, kwargs or {})) if isinstance(value, Traced)]
            sources = frozenset().union(*(getattr(value, "sources", ()) for value in traced))
            trace = next((value.trace for value in traced if hasattr(value, "trace")), None)
            for value in _leaves(result):
                if isinstance(value, Traced):
                    value.sources, value.trace = sources, trace
                elif isinstance(value, float) and trace is not None:
                    trace.read |= sources
            return result

    return Traced


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value
