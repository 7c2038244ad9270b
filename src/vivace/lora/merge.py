"""LoRAs: read in every layout that diffusers converts, and merged into weights: W + (alpha / rank) B A.

The layouts are diffusers' own, kohya's, PEFT's and those of FLUX's trainers; the PEFT library is not needed. Merged, a
LoRA adds no cost per step. The sum of all LoRAs is computed in fp32 and rounded once.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.contract import COMPONENTS, DENOISERS, Component, attribute_of, component_of
from vivace.errors import UnusableModel
from vivace.foreign.reading import reading
from vivace.models.headers import read_header

if TYPE_CHECKING:
    import torch

_METADATA = "lora_adapter_metadata"
"""What diffusers writes beside the matrices: PEFT's configuration, with alphas and ranks."""

_OTHER_LAYOUTS = {
    "base_model": "; it is an adapter as PEFT itself saves one: save it with pipe.save_lora_weights, or rename "
    "'base_model.model.' to '{wanted}.' in its keys",
    "diffusion_model": "; diffusers does not convert ComfyUI's layout for this model: if the rest of the names are "
    "diffusers', rename 'diffusion_model.' to '{wanted}.' in its keys",
}
"""What to do with files of a layout that diffusers does not read for every model, by how their keys begin."""


@dataclass(frozen=True)
class LoraLayer:
    """What a LoRA adds to one layer: scale B A.

    Attributes:
        down: A, (rank, in_features), or (rank, in_channels, height, width) of a convolution.
        up: B, (out_features, rank).
        scale: alpha / rank.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


LoraLayers = Mapping[Component, Mapping[str, LoraLayer]]
"""The layers that a file changes, by component and by their names in it."""


def read_lora(pipe: Any, path: Path) -> LoraLayers:
    """Read a LoRA for a pipeline of this class and these configurations. Whether it fits, `mismatch` says.

    Raises:
        UnusableModel: it is damaged, no LoRA, or one of a kind that is no sum of W and B A.
    """
    from safetensors.torch import load_file

    read_header(path)  # says what is wrong with a damaged file
    with reading(path, problem="is not a LoRA that diffusers reads", advice="copy or download it again"):
        stored = load_file(path)
        _check_kind(path, stored)
        state, alphas = _converted(pipe, stored)
        parts = {attribute_of(pipe, component): component for component in COMPONENTS}
        found: dict[Component, Mapping[str, LoraLayer]] = {}
        for attribute in dict.fromkeys(key.partition(".")[0] for key in state):
            if attribute not in parts and attribute not in DENOISERS:
                wanted = attribute_of(pipe, "denoiser")
                advice = _OTHER_LAYOUTS.get(attribute, "").format(wanted=wanted)
                raise UnusableModel(
                    f"{path} is not a LoRA that diffusers reads: a layer's name begins with '{attribute[:80]}', not "
                    f"with that of the denoiser or a text encoder{advice}"
                )
            component = parts.get(attribute, "denoiser")
            own, scales = _of_part(state, attribute), _of_part(alphas, attribute)
            configuration = _configuration(path, attribute)
            found[component] = _layers(path, pipe, component, own, scales, configuration)
    if not any(found.values()):
        raise UnusableModel(f"{path} has no LoRA layers; give a LoRA in safetensors format")
    return found


def mismatch(pipe: Any, path: Path, layers: LoraLayers) -> str | None:
    """Return why a LoRA is not one for this pipeline's modules; None if it fits."""
    for component, changed in layers.items():
        name, module = attribute_of(pipe, component), component_of(pipe, component)
        if module is None:
            return f"{path} is not a LoRA for this pipeline, which has no {component}"
        known = dict(module.named_modules())
        for layer, matrices in changed.items():
            shape = _shape(known[layer]) if layer in known else None
            if shape is None:
                what = "has no such layer" if layer not in known else "takes none there"
                return f"{path} is not a LoRA for this {name}, which {what} ({layer})"
            wanted = math.prod(shape[1:])
            if (
                matrices.down.numel() != matrices.rank * wanted
                or matrices.up.numel() != shape[0] * matrices.rank
            ):
                return (
                    f"{path} is not a LoRA for this {name}: {layer} is {'x'.join(map(str, shape))}, and the LoRA's "
                    f"matrices are {_sizes(matrices.down)} and {_sizes(matrices.up)}"
                )
    return None


def merge(pipe: Any, path: Path, amount: float = 1.0) -> int:
    """Merge the LoRA in `path` into `pipe`; return the number of changed layers.

    Args:
        amount: factor by which the LoRA is scaled.

    Raises:
        UnusableModel: the file is not a LoRA for this pipeline.
    """
    layers = read_lora(pipe, path)
    if (problem := mismatch(pipe, path, layers)) is not None:
        raise UnusableModel(f"{problem}; give the LoRA of this model")
    return sum(merge_all(pipe, [(layers, amount)]).values())


def merge_all(pipe: Any, loras: Sequence[tuple[LoraLayers, float]]) -> Counter[Component]:
    """Merge several LoRAs, each with its factor, rounding each weight once; return the changed layers by component."""
    import torch

    changed: Counter[Component] = Counter()
    for component in COMPONENTS:
        parts = [(layers[component], amount) for layers, amount in loras if component in layers]
        modules = dict(component_of(pipe, component).named_modules()) if parts else {}
        for name in dict.fromkeys(name for layers, _ in parts for name in layers):
            weight = modules[name].weight
            with torch.no_grad():
                total = weight.float()
                for layers, amount in parts:
                    if name in layers:
                        total = total + amount * delta(layers[name], weight)
                weight.copy_(total.to(weight.dtype))
            changed[component] += 1
    return changed


def delta(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    """Return what a LoRA adds to a weight, in fp32, of the weight's shape and on its device."""
    import torch

    down, up = (matrix.to(weight.device, torch.float32) for matrix in (layer.down, layer.up))
    return layer.scale * (up.flatten(1) @ down.flatten(1)).reshape(
        weight.shape
    )  # 1x1 and 3x3 convolutions too


def _check_kind(path: Path, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise UnusableModel for kinds whose extra tensors diffusers would drop, or the sum would lack."""
    kinds = {
        "dora_scale": "DoRA, which rescales the weights",
        "lora_magnitude_vector": "DoRA, which rescales the weights",
        "hada_w1": "LoHa, a product of two LoRAs",
        "lokr_w1": "LoKr, a Kronecker product",
        "lora_mid": "a LoRA of three matrices (Tucker decomposition)",
    }
    for key, tensor in stored.items():
        kind = next((kind for part, kind in kinds.items() if part in key), None)
        if kind is None and ".lora_B" in key and key.endswith(".bias"):
            kind = "a LoRA that changes biases too"
        if kind is not None:
            raise UnusableModel(f"{path} is {kind} ({key}); vivace adds LoRAs of two matrices: give one")
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise UnusableModel(f"{path} has values that are not finite ({key}); train or download it again")


def _converted(pipe: Any, stored: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return matrices and alphas by names that begin with the pipeline's attribute, as diffusers converts them."""
    convert = type(pipe).lora_state_dict
    given: dict[str, Any] = {}
    if getattr(pipe, "unet", None) is not None:
        given["unet_config"] = pipe.unet.config
    if "return_alphas" in inspect.signature(convert).parameters:
        given["return_alphas"] = True  # else FLUX's are dropped
    found = convert(stored, **given)
    state, alphas = found[:2] if isinstance(found, tuple) else (found, None)
    return state, alphas or {}


def _of_part(values: Mapping[str, Any], attribute: str) -> dict[str, Any]:
    start = f"{attribute}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _layers(
    path: Path,
    pipe: Any,
    component: Component,
    state: dict[str, Any],
    alphas: dict[str, Any],
    configuration: Mapping[str, Any],
) -> dict[str, LoraLayer]:
    """Return one component's layers by their names in the module."""
    from diffusers.utils.state_dict_utils import (
        convert_all_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    convert = convert_unet_state_dict_to_peft if component == "denoiser" else convert_all_state_dict_to_peft
    module = component_of(pipe, component)

    def renamed(values: dict[str, Any], rename: Any) -> dict[str, Any]:
        found = rename(values) if values else {}
        if component != "denoiser" and not hasattr(module, "text_model"):
            # transformers has flattened CLIPTextModel; files are older.
            return {key.removeprefix("text_model."): value for key, value in found.items()}
        return dict(found)

    matrices: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in renamed(state, convert).items():
        layer, _, role = key.partition(".lora_")
        matrices[layer][role] = value
    # Alphas are named after their layer, or after one of its matrices, and are then renamed in the same way.
    scales = {key.removesuffix(".alpha"): float(alpha) for key, alpha in alphas.items()}
    rename = convert_unet_state_dict_to_peft if component == "denoiser" else _renamed_alphas
    by_layer = {key.partition(".lora_")[0]: alpha for key, alpha in renamed(scales, rename).items()}
    found = {}
    for layer, roles in matrices.items():
        if roles.keys() != {"A.weight", "B.weight"}:
            given = ", ".join(sorted(roles)) or "nothing"
            raise UnusableModel(
                f"{path} is not a LoRA that diffusers reads: {layer} has {given}, not two matrices"
            )
        down, up = roles["A.weight"], roles["B.weight"]
        rank = down.shape[0]
        if not rank or down.dim() < 2 or up.dim() < 2 or up.shape[1] != rank:
            sizes = f"{_sizes(down)} and {_sizes(up)}"
            raise UnusableModel(f"{path}: the matrices of {layer} do not go together ({sizes})")
        found[layer] = LoraLayer(down, up.flatten(1), _scale(layer, rank, by_layer.get(layer), configuration))
    return found


def _renamed_alphas(values: dict[str, Any]) -> dict[str, Any]:
    """As the matrices of a text encoder: alphas may be named after one of them, or after the layer alone."""
    from diffusers.utils.state_dict_utils import convert_state_dict_to_peft

    try:
        return dict(convert_state_dict_to_peft(values))
    except ValueError:  # only layers, which need no other name
        return values


def _scale(layer: str, rank: int, alpha: float | None, configuration: Mapping[str, Any]) -> float:
    """Return alpha / rank, from the file's tensors or from PEFT's configuration in its header."""
    if configuration:
        alpha = _patterned(configuration.get("alpha_pattern"), layer, configuration.get("lora_alpha"))
        if configuration.get("use_rslora"):
            return (rank if alpha is None else alpha) / math.sqrt(rank)
    return 1.0 if alpha is None else alpha / rank


def _patterned(patterns: Any, layer: str, default: Any) -> float | None:
    """Return PEFT's value for a layer: that of the first pattern that its name ends with, else the default."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return float(value)
    return None if default is None else float(default)


def _configuration(path: Path, attribute: str) -> Mapping[str, Any]:
    """Return PEFT's configuration of one component from the file's header; empty if it has none."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        text = (file.metadata() or {}).get(_METADATA)
    content = json.loads(text) if text else {}
    return _of_part(content if isinstance(content, dict) else {}, attribute)


def _shape(layer: torch.nn.Module) -> tuple[int, ...] | None:
    """Return the shape of a layer's weight, however it is stored; None for another kind of layer."""
    if hasattr(layer, "in_features"):
        return layer.out_features, layer.in_features
    if hasattr(layer, "kernel_size") and hasattr(layer, "in_channels"):
        return layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size
    return None


def _sizes(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))
