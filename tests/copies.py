"""Copies of pipelines in a fifth of the time of copy.deepcopy, which walks each dictionary of each module in Python."""

import copy
import io
import pickle
from types import FunctionType
from typing import Any

import torch

from vivace.models import load
from vivace.models.find import WEIGHTS, LocatedModel


class _Pickler(pickle.Pickler):
    """Leaves tensors and functions where they are, and writes their numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.left: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor | FunctionType):
            return None
        self.left.append(value)
        return len(self.left) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, left: list[Any]) -> None:
        super().__init__(file)
        self._left = left
        self._memo: dict[int, Any] = {}

    def persistent_load(self, number: int) -> Any:
        return copy.deepcopy(self._left[number], self._memo)


class Copies:
    """Copies of a pipeline, whose networks and scheduler are their own; tokenizers are shared."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        file = io.BytesIO()
        pickler = _Pickler(file)
        from diffusers import SchedulerMixin

        parts = pipe.components.items()
        pickler.dump({k: part for k, part in parts if isinstance(part, torch.nn.Module | SchedulerMixin)})
        self._pickled, self._left = file.getvalue(), pickler.left

    def make(self) -> Any:
        pipe = copy.copy(self._pipe)
        for name, part in _Unpickler(io.BytesIO(self._pickled), self._left).load().items():
            setattr(pipe, name, part)
        return pipe


_LOADED: dict[tuple[Any, ...], Copies] = {}


def read_embedded_models_once() -> None:
    """From now on, who loads a model that ships with vivace gets a copy of what this process read first."""
    read = load._from_files

    def read_or_copy(located: LocatedModel, dtype: Any) -> Any:
        if located.folder is None or located.folder.parent != WEIGHTS or located.components:
            return read(located, dtype)
        key = (located.folder, dtype, located.variant, tuple(located.without))
        if key not in _LOADED:
            _LOADED[key] = Copies(read(located, dtype))
        pipe = _LOADED[key].make()
        for name, part in pipe.components.items():
            if hasattr(part, "add_tokens"):  # as some tests do
                setattr(pipe, name, copy.deepcopy(part))
        return pipe

    load._from_files = read_or_copy
