"""Refuse copies of a session's pipeline, and `save_pretrained`, where the result would be wrong: closures go on
computing with the original, and the layers that techniques left are written under a configuration that makes others."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any, NoReturn

from vivace.errors import Unsupported
from vivace.models.quiet import quiet

_COPIED = (
    "it would go on computing with the weights of the original; apply the recipe to a copy that was made before: "
    "vivace.apply(copy.deepcopy(pipe), recipe)"
)

_PLAIN = frozenset({bool, float, int, str, type(None)})


def guard(pipe: Any) -> None:
    """Let a pipeline and its networks refuse to be copied or saved, where the result would be wrong."""
    import torch

    networks = [
        part for part in getattr(pipe, "components", {}).values() if isinstance(part, torch.nn.Module)
    ]
    bound = [any(map(_is_bound, network.modules())) for network in networks]
    for owner, is_bound in ((pipe, any(bound) or _is_bound(pipe)), *zip(networks, bound, strict=True)):
        if is_bound:
            owner.__deepcopy__ = functools.partial(_refuse_copy, type(owner).__name__)
        if hasattr(type(owner), "save_pretrained"):
            owner.save_pretrained = MethodType(_checking(type(owner).save_pretrained), owner)


def _refuse_copy(name: str, _: Any) -> NoReturn:
    raise Unsupported(f"this {name} cannot be copied with its recipe: {_COPIED}")


def _is_bound(owner: Any) -> bool:
    """Whether an object has a function that refers to it, or to another network, in its closure. Those of diffusers'
    hooks do."""
    if "_diffusers_hook" in vars(owner):
        return True
    seen: set[int] = set()
    return any(
        _refers(value, seen, is_inside=False)
        for attribute in vars(owner).values()
        for value in (attribute.values() if isinstance(attribute, dict) else (attribute,))
    )


def _refers(value: Any, seen: set[int], *, is_inside: bool) -> bool:
    """Whether a closure holds a network, a weight or a pipeline."""
    if type(value) in _PLAIN:  # most are, and asking for this first takes a third of the time
        return False
    import torch

    if isinstance(value, torch.nn.Module | torch.nn.Parameter) or hasattr(type(value), "from_pretrained"):
        return is_inside
    if isinstance(value, type | torch.Tensor) or id(value) in seen:
        return False
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, FunctionType):
        if hasattr(value, "_torchdynamo_orig_callable"):
            return True
        is_inside = is_inside or value.__globals__["__name__"].startswith("vivace.")
        parts = [cell.cell_contents for cell in value.__closure__ or ()] if is_inside else []
    elif isinstance(value, MethodType):
        parts = [value.__self__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif type(value).__module__.startswith("vivace."):
        parts = list(getattr(value, "__dict__", {}).values())
    return any(_refers(part, seen, is_inside=is_inside) for part in parts)


def _checking(save: Any) -> Any:
    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, part in (getattr(self, "components", None) or {type(self).__name__: self}).items():
            if (reason := _unreadable(part)) is not None:
                raise Unsupported(
                    f"save_pretrained would write a {name} that diffusers cannot read: {reason}; save the pipeline "
                    "before a recipe is applied, or write a folder with the recipe: vivace save MODEL FOLDER "
                    "--recipe RECIPE"
                )
        return save(self, *args, **kwargs)

    return save_pretrained


def _unreadable(part: Any) -> str | None:
    """Return why a network's weights are not those that its class makes of its configuration, or None."""
    import torch

    is_ours = isinstance(part, torch.nn.Module) and getattr(part, "hf_quantizer", None) is None
    if not is_ours or not hasattr(type(part), "from_pretrained"):
        return None
    beside = {name: tensor for name, tensor in part.named_buffers() if ".vivace_" in name}  # of a hot LoRA
    state = part.state_dict() | beside
    if absent := [name for name, tensor in state.items() if tensor.is_meta]:
        return f"{absent[0]} is on the meta device, where other libraries offload it"
    if stored := [name for name, tensor in state.items() if hasattr(tensor, "__tensor_flatten__")]:
        return f"{stored[0]} is quantised"
    with quiet(), torch.device("meta"):
        made = (
            type(part).from_config(part.config) if hasattr(part, "from_config") else type(part)(part.config)
        )
    shapes, own = ({name: tuple(t.shape) for name, t in each.items()} for each in (made.state_dict(), state))
    other = sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name))
    return f"a recipe changed {len(other)} of its weights, {other[0]} for one" if other else None
