"""Which layers are quantised, which are left alone, and how to say so briefly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vivace.quantization.scheme import Scheme, Settings

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class Choice:
    """The layers of one component by name. `kept` says why each of those is left alone."""

    taken: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    num_before: int = 0
    """Of those left alone, how many are quantised already."""


def patterns_of(skip: str) -> list[str]:
    """A knob's text, e.g. "proj_out, *.ff.*", as patterns."""
    return [part for part in re.split(r"[,\s]+", skip) if part]


def is_named(name: str, pattern: str) -> bool:
    """Whether a pattern names a layer: the whole of it, its last parts, or a module that it lies in."""
    parts = name.split(".")
    spans = (".".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j))
    return any(fnmatchcase(span, pattern) for span in spans)


def layers_of(module: Any) -> dict[str, Any]:
    """Linear and Conv2d layers by name, whatever holds their weights."""
    import torch

    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }


def choose(module: Any, scheme: Scheme, settings: Settings, skip: list[str], min_weights: int) -> Choice:
    """Sort the layers of a component. Layers that share one weight share their fate."""
    choice = Choice()
    # T5 casts what enters these to the dtype of their weights; both libraries name them to keep them from overflowing.
    asked = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if scheme.hides_dtype else set()
    for name, layer in layers_of(module).items():
        reason = _reason(layer, name, scheme, settings, skip, min_weights)
        if reason is None and asked.intersection(name.split(".")):
            reason = (
                "its model casts inputs to the dtype of its weights, which would be that of the stored bytes"
            )
        if reason is None:
            choice.taken.append(name)
        else:
            choice.kept[name] = reason
            choice.num_before += reason == _BEFORE
    return choice


_BEFORE = "quantised already"


def _reason(
    layer: Any, name: str, scheme: Scheme, settings: Settings, skip: list[str], min_weights: int
) -> str | None:
    import torch

    if is_quantised(layer):
        return _BEFORE
    if any(is_named(name, pattern) for pattern in skip):
        return "skip"
    if isinstance(layer, torch.nn.Conv2d) and not (scheme.takes_convolutions and settings.convolutions):
        return "convolution"
    if layer.weight.numel() < min_weights:
        return f"fewer than {min_weights} weights"
    if not layer.weight.is_floating_point() or layer.weight.element_size() < 2:
        return f"its weights are {str(layer.weight.dtype).removeprefix('torch.')}"
    return scheme.keeps(layer, name, settings)


def is_quantised(layer: Any) -> bool:
    """Whether the weight is a quantised tensor (of any library), or the layer one of a library's own."""
    import torch

    weight = getattr(layer, "weight", None)
    return type(weight) is not torch.nn.Parameter or hasattr(weight, "__tensor_flatten__")


def put(module: Any, name: str, layer: Any) -> None:
    """Put a layer in the place of the one that has this name."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


def briefly(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers alone as one: ["blocks.0.to_q", "blocks.1.to_q"] is ["blocks.*.to_q (2)"]."""
    found = Counter(NUMBER.sub("*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in found.items()]


def briefly_why(kept: dict[str, str]) -> list[str]:
    """["blocks.*.norm.linear (4): skip", ...]."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in kept.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{name}: {reason}" for reason, names in by_reason.items() for name in briefly(names)]


def bring(module: Any, device: Any) -> None:
    """Move what is not on the device yet. `Module.to` would touch every weight, and some quantised ones are widened by
    that, even where they are (torchao's NF4)."""
    import torch

    kind = torch.device(device).type
    made: dict[int, tuple[Any, Any]] = {}  # what two modules share, they go on sharing
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is None or old.device.type == kind:
                    continue
                if id(old) not in made:
                    new = old.to(device)
                    # Quantised weights of some libraries are parameters of their own kind, and stay it.
                    if isinstance(old, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = (old, new)
                held[name] = made[id(old)][1]
