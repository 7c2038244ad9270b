"""A module as it is now, structure and weights, for another process: the weights apart, to go from GPU to GPU."""

from __future__ import annotations

import functools
import io
import pickle
import types
from typing import Any


def pack_module(module: Any, device: str) -> tuple[bytes, list[Any]]:
    """The module pickled without its storages, and those on `device` ("cpu" or "cuda") as tensors of bytes, in order.

    Quantised weights are taken apart as `torch.save` does it. Storages on other devices are pickled with it.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: it holds what cannot be pickled, such as local functions.
    """
    import torch

    storages: dict[int, Any] = {}
    places: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
                return None
            is_typed = isinstance(obj, torch.storage.TypedStorage)
            storage = obj._untyped_storage if is_typed else obj
            dtype = obj.dtype if is_typed else None
            if storage.device.type != device:
                return dtype, None, bytes(storage.tolist()), storage.device.type
            key = storage._cdata
            storages.setdefault(key, storage)
            return dtype, places.setdefault(key, len(places)), storage.nbytes(), device

        def reducer_override(self, obj: Any) -> Any:
            # torchao binds partial functions as methods (`extra_repr`), which pickle looks for by a name.
            if isinstance(obj, types.MethodType) and isinstance(obj.__func__, functools.partial):
                return _bound, (obj.__func__, obj.__self__)
            return NotImplemented

    pickled = io.BytesIO()
    Pickler(pickled, protocol=pickle.HIGHEST_PROTOCOL).dump(module)
    return pickled.getvalue(), [as_bytes(storage) for storage in storages.values() if storage.nbytes()]


def unpack_module(pickled: bytes, device: str) -> tuple[Any, list[Any]]:
    """The module with its storages uninitialised, and those as tensors of bytes, in `pack_module`'s order."""
    import torch

    storages: dict[int, Any] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            dtype, place, held, where = pid
            if place is None:
                storage = torch.UntypedStorage(list(held), device=where)
            elif place in storages:
                storage = storages[place]
            else:
                storage = storages[place] = torch.UntypedStorage(held, device=device)
            if dtype is None:
                return storage
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    module = Unpickler(io.BytesIO(pickled)).load()
    return module, [as_bytes(storages[place]) for place in sorted(storages) if storages[place].nbytes()]


def _bound(function: Any, module: Any) -> Any:
    return types.MethodType(function, module)


def as_bytes(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
