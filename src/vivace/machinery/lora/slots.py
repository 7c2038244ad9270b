"""The layers of a model by diffusers' names, also where a technique has merged them into larger ones.

What takes layers (`takes_layers`) has slots for them (`lora_slots`): a slot has the layer's name, its sizes, and where
there can be a LoRA `reserve_rank`, and `down`, `up` and `amount`, which its owner's `write_loras` takes over. What that
writes and a forward reads are the owner's `lora_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def named_layers(model: Any) -> dict[str, Any]:
    """Return modules and slots by name."""
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name, module in modules.items() if getattr(module, "takes_layers", False))
    layers = {
        name: module
        for name, module in modules.items()
        if not name.startswith(inside) and f"{name}." not in inside
    }
    return layers | {slot.name: slot for module in modules.values() for slot in _slots(module) if slot.name}


def owners_of(model: Any, slots: Iterable[Any]) -> list[Any]:
    """Return the modules that take over the LoRAs written to slots."""
    written = {id(slot) for slot in slots if hasattr(slot, "reserve_rank")}
    return [module for module in model.modules() if any(id(slot) in written for slot in _slots(module))]


def _slots(module: Any) -> Iterable[Any]:
    return getattr(module, "lora_slots", ())
