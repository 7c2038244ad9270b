"""Find a pipeline's layers by their names in LoRA files.

Files name layers as diffusers or the original code does, with dots or, kohya's and LyCORIS's, with underscores only,
behind a prefix for the component. All of these are made from the pipeline's own modules, so that each name is either
that of a layer or unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.machinery.lora.changes import Rows
from vivace.machinery.technique import COMPONENTS, Component, component_of
from vivace.machinery.technique.anatomy import TEXT_ENCODERS
from vivace.models.checkpoints.read_denoiser import original_names

if TYPE_CHECKING:
    import torch

_PREFIXES = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"base_model\.(?:model\.)?|pipe\.", None),
        (r"(?:lora_unet|lora_transformer|lycoris_unet|lycoris_transformer(?!_blocks)|lycoris)[._]", "denoiser"),
        (r"(?:model\.)?diffusion_model[._]|(?:unet|transformer|dit)\.", "denoiser"),
        (r"(?:lora_te|lycoris_text_encoder|text_encoder)(?:1|_1)?[._](?![23][._])", "text_encoder"),
        (r"(?:lora_te|lycoris_text_encoder|text_encoder)_?2[._]", "text_encoder_2"),
        (r"(?:lora_te|lycoris_text_encoder|text_encoder)_?3[._]", "text_encoder_3"),
        (r"text_encoders\.(?:t5xxl|t5|umt5\w*)\.(?:transformer\.)?", "text_encoder_3"),
        (r"text_encoders\.clip_g\.(?:transformer\.)?", "text_encoder_2"),
        (r"text_encoders\.\w+\.(?:transformer\.)?", "text_encoder"),
    )
)  # fmt: skip
_MOST_PREFIXES = 6
"""Words of a name that are tried as a prefix."""
_WRAPPERS = re.compile(r"\A(?:(?:text_model|language_model|model)[._])+")
"""Prefixes of a text encoder's layers, which differ between versions of libraries."""
_PROCESSOR = re.compile(r"(.*?)(?:[._]processor)?[._](to_[qkv]|to_out)_lora")
_OF_PROCESSOR = {
    "to_q": ("to_q", "q_proj"),
    "to_k": ("to_k", "k_proj"),
    "to_v": ("to_v", "v_proj"),
    "to_out": ("to_out.0", "out_proj", "to_out"),
}
"""The layers that matrices of diffusers' former attention processors belong to, in denoisers and in text encoders."""


@dataclass(frozen=True)
class LayerPlace:
    """A layer, and its rows in a file's change; None for all."""

    layer: str
    rows: Rows | None = None


@dataclass(frozen=True)
class Named:
    """The meaning of a file's name: the component (None where the pipeline lacks it), the part that the file names or
    "", and the layers, none if the component has no such layer."""

    component: Component | None
    part: str
    places: tuple[LayerPlace, ...]


class LayerNames:
    """The names of a pipeline's layers, and the shapes of the weights of those that have one."""

    def __init__(self, pipe: Any) -> None:
        self.layers: dict[Component, dict[str, torch.nn.Module]] = {}
        self.shapes: dict[Component, dict[str, tuple[int, ...]]] = {}
        self._tables: dict[Component, dict[str, tuple[LayerPlace, ...]]] = {}
        for component in COMPONENTS:
            module = component_of(pipe, component)
            if module is None or component == "vae":
                continue
            layers = named_layers(module)
            self.layers[component] = layers
            shapes = {name: shape_of(layer) for name, layer in layers.items() if name}
            self.shapes[component] = {name: shape for name, shape in shapes.items() if shape}
            self._tables[component] = dict(_names(component, module, layers, self.shapes[component]))

    def find(self, written: str) -> tuple[Named, ...]:
        """Return the possible meanings of a name: one, or without a component, each component that has such a layer."""
        part, rest = _without_prefix(written)
        if part:
            component = self._component(part)
            if component is None:
                return (Named(None, part, ()),)
            return (Named(component, part, self._places(component, rest)),)
        meanings = [Named(c, "", places) for c in self._tables if (places := self._places(c, rest))]
        first = [named for named in meanings if named.component == "denoiser"] or meanings
        return tuple(first) or (Named("denoiser", "", ()),)

    def unknown_prefix(self, written: Collection[str]) -> str:
        """Return a beginning of all these names without which each is one of the denoiser's layers, or ""."""
        first = next(iter(written), "")
        ends = [match.end() for match in re.finditer(r"[._]", first)]
        return next(
            (
                first[:end]
                for end in ends[:_MOST_PREFIXES]
                if all(
                    name.startswith(first[:end]) and self._places("denoiser", _without_prefix(name[end:])[1])
                    for name in written
                )
            ),
            "",
        )

    def _component(self, part: str) -> Component | None:
        if part == "text_encoder_3" and part not in self._tables:  # files of FLUX.1 call its T5 the third
            return next(
                (c for c in TEXT_ENCODERS if "T5" in type(self.layers.get(c, {}).get("")).__name__), None
            )
        return next((component for component in self._tables if component == part), None)

    def _places(self, component: Component, rest: str) -> tuple[LayerPlace, ...]:
        table = self._tables[component]
        return next((table[name] for name in _spellings(component, rest) if table.get(name)), ())


def shape_of(layer: torch.nn.Module) -> tuple[int, ...] | None:
    """Return the shape of a layer's weight, however it is stored; None for a module without one.

    PEFT puts the layer of an attached LoRA into another one, which has its weight and not all of its settings.
    """
    import torch

    layer = getattr(layer, "base_layer", layer)

    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return layer.out_features, layer.in_features
    if hasattr(layer, "kernel_size") and hasattr(layer, "in_channels"):
        return layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size
    weight = getattr(layer, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None


def size_of(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _without_prefix(written: str) -> tuple[str, str]:
    part, rest = "", written
    while True:
        matches = ((pattern.match(rest), component) for pattern, component in _PREFIXES)
        match, component = next((pair for pair in matches if pair[0]), (None, None))
        if match is None or (part and component not in (None, part)):
            return part, rest
        part, rest = part or component or "", rest[match.end() :]


def _spellings(component: Component, rest: str) -> Iterator[str]:
    match = _PROCESSOR.fullmatch(rest)
    names = [f"{match[1]}.{layer}" for layer in _OF_PROCESSOR[match[2]]] if match else [rest]
    for name in names:
        yield _flat(name if component == "denoiser" else _WRAPPERS.sub("", name))
    yield _flat(rest)


def _names(
    component: Component,
    module: torch.nn.Module,
    layers: Mapping[str, torch.nn.Module],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, tuple[LayerPlace, ...]]]:
    if component != "denoiser":
        for name in shapes:
            yield _flat(_WRAPPERS.sub("", name)), (LayerPlace(name),)
        return
    classes = {name: type(layer).__name__ for name, layer in layers.items()}
    for original, own, swapped in original_names(module, classes):
        if all(name in shapes for name in own):
            yield _flat(original), _places(own, [shapes[name][0] for name in own], swapped=swapped)
    for name in shapes:
        yield _flat(name), (LayerPlace(name),)


def _places(layers: tuple[str, ...], rows: list[int], *, swapped: bool) -> tuple[LayerPlace, ...]:
    if swapped:
        half = rows[0] // 2
        return (LayerPlace(layers[0], ((half, rows[0]), (0, half))),)
    if len(layers) == 1:
        return (LayerPlace(layers[0]),)
    ends = [sum(rows[: k + 1]) for k in range(len(rows))]
    return tuple(
        LayerPlace(layer, ((end - number, end),))
        for layer, end, number in zip(layers, ends, rows, strict=True)
    )


# What takes layers (`takes_layers`) has slots for them (`lora_slots`): a slot has the layer's name, its sizes, and
# where there can be a LoRA `reserve_rank`, and `down`, `up` and `amount`, which its owner's `write_loras` takes over.
# What that writes and a forward reads are the owner's `lora_tensors`.
def named_layers(model: Any) -> dict[str, Any]:
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name, module in modules.items() if getattr(module, "takes_layers", False))
    layers = {
        name: module
        for name, module in modules.items()
        if not name.startswith(inside) and f"{name}." not in inside
    }
    return layers | {slot.name: slot for module in modules.values() for slot in _slots(module) if slot.name}


def owners_of(model: Any, slots: Iterable[Any]) -> list[Any]:
    written = {id(slot) for slot in slots if hasattr(slot, "reserve_rank")}
    return [module for module in model.modules() if any(id(slot) in written for slot in _slots(module))]


def _slots(module: Any) -> Iterable[Any]:
    return getattr(module, "lora_slots", ())
