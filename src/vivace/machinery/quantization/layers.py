"""Choose the layers to quantise, with reasons for the skipped ones, and summarise long lists of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from vivace.errors import NoEffect, Unsupported
from vivace.machinery.quantization.scheme import Scheme, SchemeSettings
from vivace.machinery.technique import Component, Target

if TYPE_CHECKING:
    import torch

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_QUANTISED_BEFORE = "quantised already"
ONE_ROW = (
    "*time*",
    "*norm*.linear",
    "add_embedding",
    "*guidance_embed*",
    "text_projection",
    "class_embedding",
)
"""Layers that get one row per image, whatever its size: embeddings of time and of pooled text, modulation."""


@dataclass
class LayerChoice:
    """The layers of one component by name. `skipped` gives the reason for each layer that stays as it is."""

    chosen: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    num_quantised_before: int = 0
    """Skipped layers that are quantised already."""


def patterns_of(skip: str) -> list[str]:
    """Split the text of the knob `skip`, e.g. "proj_out, *.ff.*", into patterns."""
    return [part for part in re.split(r"[,\s]+", skip) if part]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a layer's name, some consecutive parts of it, or a module that contains the layer."""
    parts = name.split(".")
    spans = (".".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j))
    return any(fnmatchcase(span, pattern) for span in spans)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def layers_of(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    import torch

    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }


def choose(
    module: torch.nn.Module, scheme: Scheme, settings: SchemeSettings, skip: list[str], min_weights: int
) -> LayerChoice:
    """Sort the layers of a component into those that the scheme takes and those that it skips."""
    choice = LayerChoice()
    # T5 casts the inputs of these layers to the dtype of their weights; transformers and diffusers list them because
    # they overflow in fp16.
    dtype_is_read = (
        set(getattr(module, "_keep_in_fp32_modules", None) or ()) if scheme.reports_storage_dtype else set()
    )
    for name, layer in layers_of(module).items():
        reason = _why_skipped(layer, name, scheme, settings, skip, min_weights)
        if reason is None and dtype_is_read.intersection(name.split(".")):
            reason = "its model casts inputs to the dtype of its weights, here that of the stored bytes"
        if reason is None:
            choice.chosen.append(name)
        else:
            choice.skipped[name] = reason
            choice.num_quantised_before += reason == _QUANTISED_BEFORE
    return choice


def _why_skipped(
    layer: torch.nn.Module,
    name: str,
    scheme: Scheme,
    settings: SchemeSettings,
    skip: list[str],
    min_weights: int,
) -> str | None:
    import torch

    if is_quantised(layer):
        return _QUANTISED_BEFORE
    if matches_any(name, skip):
        return "skip"
    if isinstance(layer, torch.nn.Conv2d) and not (scheme.takes_convolutions and settings.convolutions):
        return "convolution"
    if layer.weight.numel() < min_weights:
        return f"fewer than {min_weights} weights"
    if not layer.weight.is_floating_point() or layer.weight.element_size() < 2:
        return f"its weights are {str(layer.weight.dtype).removeprefix('torch.')}"
    return scheme.skips(layer, name, settings)


def is_quantised(layer: torch.nn.Module) -> bool:
    """Whether the weight is a quantised tensor of any library, or the layer is a library's own."""
    import torch

    weight = getattr(layer, "weight", None)
    return type(weight) is not torch.nn.Parameter or hasattr(weight, "__tensor_flatten__")


def replace_layer(module: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


def summarise(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in numbers: ["blocks.0.to_q", "blocks.1.to_q"] becomes ["blocks.*.to_q (2)"]."""
    counts = Counter(NUMBER.sub("*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]


def summarise_reasons(skipped: dict[str, str]) -> list[str]:
    """Merge names with the reasons: ["blocks.*.norm.linear (4): skip", ...]."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{name}: {reason}" for reason, names in by_reason.items() for name in summarise(names)]


def kinds_of(module: torch.nn.Module, choice: LayerChoice) -> dict[str, tuple[str, str]]:
    """Return the current kinds of the chosen layers: the class of the layer, and the class of its weight."""
    layers = {name: module.get_submodule(name) for name in choice.chosen}
    return {name: (type(layer).__name__, type(layer.weight).__name__) for name, layer in layers.items()}


def refuse(choices: Mapping[Component, LayerChoice]) -> NoReturn:
    """Raise NoEffect where there is no layer to quantise, and Unsupported where each has a reason against it."""
    skipped = {name: reason for choice in choices.values() for name, reason in choice.skipped.items()}
    num_before = sum(choice.num_quantised_before for choice in choices.values())
    if num_before and num_before == sum(reason != "convolution" for reason in skipped.values()):
        raise NoEffect("the weights are quantised already", already_so=True)
    if not skipped:
        raise NoEffect(f"no Linear layer to quantise in {', '.join(choices) or 'this pipeline'}")
    counts = Counter(skipped.values()).most_common()
    # A UNet is mostly convolutions, so that reason comes last: the others can be helped.
    counts.sort(key=lambda count: count[0] == "convolution")
    reasons = "; ".join(f"{number} layer{'s' * (number != 1)}: {reason}" for reason, number in counts[:5])
    more = f" and {len(counts) - 5} other reasons" if len(counts) > 5 else ""
    raise Unsupported(f"no layer can be quantised: {reasons}{more}")


def move_to(module: torch.nn.Module, device: Any) -> None:
    """Move the tensors that are not there yet: `Module.to` dequantises some (torchao's NF4) even then."""
    import torch

    kind = torch.device(device).type
    moved: dict[int, tuple[Any, Any]] = {}  # modules that share a tensor go on sharing it
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is None or old.device.type == kind:
                    continue
                if id(old) not in moved:
                    new = old.to(device)
                    # Some libraries' quantised weights are subclasses of Parameter, and must stay so.
                    if isinstance(old, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    moved[id(old)] = (old, new)
                tensors[name] = moved[id(old)][1]


def casts_its_vae(target: Target, components: tuple[Component, ...]) -> bool:
    """Whether a call casts the VAE, if it is a target, to fp32 and back: SDXL's pipelines do in fp16."""
    vae = target.modules(components).get("vae")
    if vae is None or not hasattr(target.pipe, "upcast_vae"):
        return False
    return bool(getattr(vae.config, "force_upcast", False)) and str(vae.dtype) == "torch.float16"


@dataclass(frozen=True)
class QuantizedLayers:
    """The layers of each component, and the kinds of the chosen ones; see `kinds_of`."""

    modules: Mapping[Component, torch.nn.Module]
    choices: Mapping[Component, LayerChoice]
    kinds: Mapping[Component, Mapping[str, tuple[str, str]]]

    @classmethod
    def of(
        cls, modules: Mapping[Component, torch.nn.Module], choices: Mapping[Component, LayerChoice]
    ) -> QuantizedLayers:
        kinds = {c: kinds_of(modules[c], choice) for c, choice in choices.items() if choice.chosen}
        return cls(modules, choices, kinds)

    def listed(self) -> dict[str, list[str]]:
        lists: dict[str, list[str]] = {}
        for component, kinds in self.kinds.items():
            lost = set(self._lost(component))
            lists[f"{component}.quantized"] = summarise(name for name in kinds if name not in lost)
            if self.choices[component].skipped:
                lists[f"{component}.left_alone"] = summarise_reasons(self.choices[component].skipped)
        return lists

    def no_longer(self) -> str | None:
        for component in self.kinds:
            if lost := self._lost(component):
                return f"{len(lost)} of {component}'s layers are no longer quantised: {', '.join(summarise(lost))}"
        return None

    def _lost(self, component: Component) -> list[str]:
        now = kinds_of(self.modules[component], self.choices[component])
        return [name for name, kind in self.kinds[component].items() if now[name] != kind]
