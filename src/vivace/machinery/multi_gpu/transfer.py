"""How the arguments and results of a denoiser's forward travel between processes.

A header of a few hundred bytes describes what is sent: the arguments, pickled, with an index in place of each tensor.
The tensors are packed into one buffer, so that a step takes one transfer however many arguments there are.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TensorSpec = tuple[tuple[int, ...], Any]
"""A tensor's shape and dtype."""
_ALIGNMENT = 256  # bytes; kernels expect inputs as aligned as separate allocations are
_WITHOUT_ROWS = frozenset({"txt_ids", "img_ids", "image_rotary_emb"})
"""Arguments whose first dimension is never the batch, however long it is."""


def serialize(value: Any, device: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return a header, and the tensors in `value` that are on `device`; those on others are pickled in the header."""
    tensors: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type == device:
                tensors.append(obj.detach())
                return len(tensors) - 1, tuple(obj.shape), obj.dtype
            return None

    header = io.BytesIO()
    Pickler(header, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return header.getvalue(), tensors


def deserialize(header: bytes, tensors: list[torch.Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return tensors[pid[0]]

    return Unpickler(io.BytesIO(header)).load()


def specs_in(header: bytes) -> list[TensorSpec]:
    specs: list[TensorSpec] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            specs.append(pid[1:])

    Unpickler(io.BytesIO(header)).load()
    return specs


def specs_of(tensors: list[torch.Tensor]) -> list[TensorSpec]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def num_bytes(specs: list[TensorSpec]) -> int:
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in specs)


def pack(tensors: list[torch.Tensor], device: Any) -> torch.Tensor:
    """Copy the tensors into one byte buffer."""
    specs = specs_of(tensors)
    buffer = torch.empty(num_bytes(specs), dtype=torch.uint8, device=device)
    for view, tensor in zip(unpack(buffer, specs), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def unpack(buffer: torch.Tensor, specs: list[TensorSpec]) -> list[torch.Tensor]:
    tensors, start = [], 0
    for shape, dtype in specs:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(buffer[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return tensors


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def select_rows(value: Any, rows: slice, num: int) -> Any:
    """Return these rows of every tensor that has `num` of them, also inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value[rows] if value.ndim and value.shape[0] == num else value
    if isinstance(value, list | tuple):
        return type(value)([select_rows(item, rows, num) for item in value])
    if isinstance(value, dict):
        return {
            name: item if name in _WITHOUT_ROWS else select_rows(item, rows, num)
            for name, item in value.items()
        }
    return value


def split_rows(num: int, gpus: int) -> list[slice]:
    """Return the rows of a batch of `num` for each GPU that gets any, the larger shards first."""
    sizes = [num // gpus + (k < num % gpus) for k in range(gpus)]
    starts = [sum(sizes[:k]) for k in range(gpus)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True) if size]


def pack_module(module: torch.nn.Module, device: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return the module pickled without its storages on `device`, and those as byte tensors."""
    storages: dict[int, Any] = {}
    indices: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
                return None
            is_typed = isinstance(obj, torch.storage.TypedStorage)
            storage = obj._untyped_storage if is_typed else obj
            dtype = obj.dtype if is_typed else torch.uint8
            if storage.device.type != device:
                return dtype, None, bytes(storage.tolist()), storage.device.type
            key = storage._cdata
            storages.setdefault(key, storage)
            return dtype, indices.setdefault(key, len(indices)), storage.nbytes(), device

        def reducer_override(self, obj: Any) -> Any:
            # torchao binds partial functions as methods (`extra_repr`), which pickle looks up by name.
            if isinstance(obj, types.MethodType) and isinstance(obj.__func__, functools.partial):
                return _bind, (obj.__func__, obj.__self__)
            return NotImplemented

    pickled = io.BytesIO()
    Pickler(pickled, protocol=pickle.HIGHEST_PROTOCOL).dump(module)
    return pickled.getvalue(), [_as_bytes(storage) for storage in storages.values() if storage.nbytes()]


def unpack_module(pickled: bytes, device: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Return the module with uninitialised storages, and those as byte tensors, in `pack_module`'s order."""
    storages: dict[int, Any] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            dtype, index, content, where = pid
            if index is None:
                storage = torch.UntypedStorage(list(content), device=where)
            elif index in storages:
                storage = storages[index]
            else:
                storage = storages[index] = torch.UntypedStorage(content, device=device)
            # Typed even where an untyped one was pickled, as torch.load does it: tensors of dtypes without a legacy
            # storage class (float8, uint16, ...) pickle an UntypedStorage, and what rebuilds them
            # (`torch._utils._rebuild_tensor_v3`) expects a TypedStorage.
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    module = Unpickler(io.BytesIO(pickled)).load()
    return module, [_as_bytes(storages[index]) for index in sorted(storages) if storages[index].nbytes()]


@dataclass(frozen=True)
class StorageView:
    """A tensor within a storage of a module that was sent, by the storage's place in `pack_module`'s order."""

    storage: int
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class StorageList:
    """Which storages a module had when it was packed, by address alone, so that one that the module gives up is
    freed."""

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        self._at = {storage.data_ptr(): index for index, storage in enumerate(storages)}

    def view_of(self, tensor: torch.Tensor) -> StorageView:
        storage = self._at[tensor.untyped_storage().data_ptr()]
        offset = int(tensor.storage_offset())
        return StorageView(storage, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())


def as_view(storages: Sequence[torch.Tensor], view: StorageView) -> torch.Tensor:
    made = torch.empty(0, dtype=view.dtype, device=storages[view.storage].device)
    return made.set_(storages[view.storage].untyped_storage(), view.offset, view.shape, view.stride)


def _bind(function: Any, module: Any) -> Any:
    return types.MethodType(function, module)


def _as_bytes(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
