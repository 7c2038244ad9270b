"""Send a module to another process: its structure pickled, its weights separately, so that they go from GPU to GPU."""

from __future__ import annotations

import functools
import io
import pickle
import types
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


def _bind(function: Any, module: Any) -> Any:
    return types.MethodType(function, module)


def _as_bytes(storage: Any) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
