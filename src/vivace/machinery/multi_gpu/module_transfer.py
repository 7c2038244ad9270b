"""Send a module to another process: its structure pickled, its weights separately, so that they go from GPU to GPU."""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def pack_module(module: torch.nn.Module, device: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return the module pickled without its storages on `device` ("cpu" or "cuda"), and those as byte tensors.

    Quantised weights are taken apart as `torch.save` does it.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: it holds what cannot be pickled, such as local functions.
    """
    import torch

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
    import torch

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
    """Which storages a module had when it was packed: `storages` as `pack_module` returns them.

    They are kept by their addresses alone, so that one that the module gives up is freed.
    """

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        self._at = {storage.data_ptr(): index for index, storage in enumerate(storages)}

    def view_of(self, tensor: torch.Tensor) -> StorageView:
        """Return where a tensor is."""
        storage = self._at[tensor.untyped_storage().data_ptr()]
        offset = int(tensor.storage_offset())
        return StorageView(storage, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())


def as_view(storages: Sequence[torch.Tensor], view: StorageView) -> torch.Tensor:
    """Return the tensor of a view, in the storages of the other end."""
    import torch

    made = torch.empty(0, dtype=view.dtype, device=storages[view.storage].device)
    return made.set_(storages[view.storage].untyped_storage(), view.offset, view.shape, view.stride)


def _bind(function: Any, module: Any) -> Any:
    return types.MethodType(function, module)


def _as_bytes(storage: Any) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
