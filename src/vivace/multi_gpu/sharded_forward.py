"""How a forward's arguments and results travel between the processes that share a denoiser.

A header says in a few hundred bytes what is sent: the arguments with a number in the place of each tensor, pickled. The
tensors themselves go as one buffer, so that a step takes one transfer however many arguments it has.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

_ALIGNED = 256  # bytes; kernels take their inputs to be aligned as an allocation of its own is
_WITHOUT_ROWS = frozenset({"txt_ids", "img_ids", "image_rotary_emb"})
"""Arguments whose first dimension is never the batch, however long it is."""


def take_apart(given: Any, device: str) -> tuple[bytes, list[Any]]:
    """A header, and the tensors of `given` that lie on `device` ("cpu" or "cuda"); others travel in the header."""
    import torch

    tensors: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type == device:
                tensors.append(obj.detach())
                return len(tensors) - 1, tuple(obj.shape), obj.dtype
            return None

    header = io.BytesIO()
    Pickler(header, protocol=pickle.HIGHEST_PROTOCOL).dump(given)
    return header.getvalue(), tensors


def shapes_in(header: bytes) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each tensor that a header speaks of."""
    found: list[tuple[tuple[int, ...], Any]] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            found.append(pid[1:])

    Unpickler(io.BytesIO(header)).load()
    return found


def put_together(header: bytes, tensors: list[Any]) -> Any:
    """What was taken apart, with these tensors in the places of its own."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return tensors[pid[0]]

    return Unpickler(io.BytesIO(header)).load()


def shapes_of(tensors: list[Any]) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def num_bytes(shapes: list[tuple[tuple[int, ...], Any]]) -> int:
    """Of the buffer that holds tensors of these shapes and dtypes."""
    return sum(_room(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes)


def pack(tensors: list[Any], device: Any) -> Any:
    """One buffer of bytes that holds the tensors one after the other."""
    import torch

    shapes = shapes_of(tensors)
    buffer = torch.empty(num_bytes(shapes), dtype=torch.uint8, device=device)
    for place, tensor in zip(unpack(buffer, shapes), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def unpack(buffer: Any, shapes: list[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """The tensors in a buffer, as views of it."""
    found, start = [], 0
    for shape, dtype in shapes:
        size = math.prod(shape) * dtype.itemsize
        found.append(buffer[start : start + size].view(dtype).view(shape))
        start += _room(size)
    return found


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def rows_of(given: Any, rows: slice, num: int) -> Any:
    """These rows of every tensor that has `num` of them, also inside of lists, tuples and dicts."""
    import torch

    if isinstance(given, torch.Tensor):
        return given[rows] if given.ndim and given.shape[0] == num else given
    if isinstance(given, list | tuple):
        return type(given)([rows_of(one, rows, num) for one in given])
    if isinstance(given, dict):
        return {
            name: one if name in _WITHOUT_ROWS else rows_of(one, rows, num) for name, one in given.items()
        }
    return given


def shares(num: int, gpus: int) -> list[slice]:
    """The rows of a batch for each of the GPUs that get any, the larger shares first."""
    sizes = [num // gpus + (k < num % gpus) for k in range(gpus)]
    starts = [sum(sizes[:k]) for k in range(gpus)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True) if size]
