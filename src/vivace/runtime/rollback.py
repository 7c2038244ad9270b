"""Restore a pipeline to its state before a recipe, if the recipe is refused.

Techniques change attributes, hooks and layers, and weights. References to weights are weak, so that weights replaced by
a technique are freed at once, as without a snapshot; except to tensor subclasses, which PyTorch cannot move while a weak
reference to them exists. Hence only a pipeline whose weights are all untouched can be
restored; otherwise nothing is.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from vivace.errors import VivaceError
from vivace.machinery.technique.traits import traits_by_techniques, with_traits

_DICTIONARIES = (dict, OrderedDict)
_PLAIN = frozenset({*_DICTIONARIES, bool, float, int, str, tuple, type(None)})
"""Types of most attributes: asking for these first takes a third of the time."""


@contextmanager
def put_back_on_error(pipe: Any) -> Iterator[None]:
    """Restore a pipeline if the block raises an error, or note in the error that this failed."""
    before = Snapshot(pipe)
    try:
        yield
    except BaseException as error:
        if not before.restore():
            note = "weights of the pipeline have been changed before this, so load it again"
            if isinstance(error, VivaceError):
                error.args = (f"{error}; {note}", *error.args[1:])
            else:
                error.add_note(note)
        raise


class Snapshot:
    """The references of a pipeline, its scheduler and its modules."""

    def __init__(self, pipe: Any) -> None:
        import torch

        parts = [part for part in getattr(pipe, "components", {}).values() if part is not None]
        self._networks = [part for part in parts if isinstance(part, torch.nn.Module)]
        scheduler = getattr(pipe, "scheduler", None)
        self._kind = type(scheduler)
        self._scheduler = scheduler
        self._traits = [(part, traits_by_techniques(part)) for part in self._networks]
        self._plain = [
            _Attributes(owner, owner, weak=False) for owner in (pipe, scheduler) if owner is not None
        ]
        self._modules = [_Module(module) for part in self._networks for module in part.modules()]

    def restore(self) -> bool:
        """Put everything back, and return whether that was possible. If not, nothing is changed."""
        if not all(module.is_untouched() for module in self._modules):
            return False
        # While one owner's references are put back, others must not be freed.
        held = [module.held() for module in self._modules]
        for module in self._modules:
            module.restore()
        held.clear()
        if self._scheduler is not None:
            self._scheduler.__class__ = self._kind
        for attributes in self._plain:
            attributes.restore()
        for part, traits in self._traits:
            with_traits(part, traits)
        return True


class _Attributes:
    """The attributes of an object. Dictionaries among them keep their identity, since hooks are removed from them.

    Args:
        holder: where they are put back; None: set later.
        weak: whether weights and modules among them may be freed.
    """

    def __init__(self, owner: Any, holder: Any, *, weak: bool) -> None:
        self._owner = holder
        kept = _weakly if weak else dict
        self._values = kept(vars(owner))
        self._inside = {
            name: kept(value) for name, value in vars(owner).items() if type(value) in _DICTIONARIES
        }

    def held(self) -> list[Any]:
        """Return the weakly referenced objects; None for those that are freed."""
        references = [
            *self._values.values(),
            *(item for part in self._inside.values() for item in part.values()),
        ]
        return [reference() for reference in references if isinstance(reference, weakref.ref)]

    def restore(self, owner: Any = None) -> None:
        attributes = vars(self._owner if owner is None else owner)
        attributes.clear()
        for name, value in self._values.items():
            attributes[name] = _strongly(value)
            if name in self._inside:
                attributes[name].clear()
                attributes[name].update({key: _strongly(item) for key, item in self._inside[name].items()})


class _Module:
    """A module, and what identifies the contents of its own weights."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._attributes = _Attributes(module, None, weak=True)
        self._contents = _contents(module)

    def is_untouched(self) -> bool:
        module = self._module()
        if module is None or any(each is None for each in self._attributes.held()):
            return False
        return _contents_of(self._attributes) == self._contents

    def held(self) -> list[Any]:
        return [self._module(), *self._attributes.held()]

    def restore(self) -> None:
        self._attributes.restore(self._module())


def _contents(module: Any) -> dict[str, Hashable]:
    return {name: _content(tensor) for name, tensor in _tensors(module._parameters, module._buffers)}


def _contents_of(attributes: _Attributes) -> dict[str, Hashable]:
    """Return the identity of a module's own weights as they are now."""
    inside = attributes._inside
    then = ({k: _strongly(v) for k, v in inside[part].items()} for part in ("_parameters", "_buffers"))
    return {name: _content(tensor) for name, tensor in _tensors(*then)}


def _tensors(*parts: Any) -> list[tuple[str, Any]]:
    return [(name, tensor) for part in parts for name, tensor in part.items() if tensor is not None]


def _content(tensor: Any) -> Hashable:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
        return id(tensor), tensor.dtype
    return id(tensor), tensor.dtype, tensor.device, tensor.data_ptr(), tensor.stride(), tensor._version


def _weakly(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dictionary that refers weakly to weights and modules. Most of a module's are empty."""
    if not values:
        return {}
    freed = _freed_types()
    return {
        name: weakref.ref(value)
        if type(value) not in _PLAIN and isinstance(value, freed) and not hasattr(value, "__tensor_flatten__")
        else value
        for name, value in values.items()
    }


@cache
def _freed_types() -> tuple[type, ...]:
    import torch

    return torch.Tensor, torch.nn.Module


def _strongly(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value
