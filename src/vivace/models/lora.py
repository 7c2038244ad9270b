"""Merge a LoRA into a denoiser's weights: W + (alpha / rank) B A, so that it adds no cost per step.

Supports every layout that diffusers converts (its own, kohya's, PEFT's); the PEFT library is not needed. The sum is
computed in fp32 and rounded once.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from vivace.contract import Distillation
from vivace.contract.script import literal
from vivace.errors import UnusableModel
from vivace.foreign.reading import reading
from vivace.models.entry import Entry, FewSteps, Part
from vivace.models.find import WEIGHTS
from vivace.models.headers import read_header
from vivace.models.remote import fetch_part


def distillations(entry: Entry | None) -> tuple[Distillation, ...]:
    """Return the few-step LoRAs that the catalogue lists for a model."""
    return tuple(_distillation(one) for one in (entry.few_steps if entry is not None else ()))


def _distillation(known: FewSteps) -> Distillation:
    lora = known.lora
    arguments: tuple[str, ...]

    def add(pipe: Any) -> int:
        return merge(pipe, WEIGHTS / lora if isinstance(lora, str) else fetch_part(lora), known.scale)

    if isinstance(lora, Part):
        where = f"{lora.repo}/{lora.files[0]}@{lora.revision}"
        arguments = (
            literal(lora.repo),
            f"weight_name={literal(lora.files[0])}",
            f"revision={literal(lora.revision)}",
        )
    else:
        folder, _, file = lora.rpartition("/")
        where, arguments = lora, (f"WEIGHTS / {literal(folder)}", f"weight_name={literal(file)}")
    return Distillation(
        kind=known.kind,
        steps=known.steps,
        guidance_scale=known.guidance_scale,
        scheduler=known.scheduler.class_name,
        scheduler_config=known.scheduler.overrides,
        scale=known.scale,
        where=where,
        arguments=arguments,
        merge=add,
    )


def merge(pipe: Any, path: Path, amount: float = 1.0) -> int:
    """Merge the LoRA in `path` into the UNet or transformer of `pipe`; return the number of changed layers.

    Args:
        amount: factor by which the LoRA is scaled.

    Raises:
        UnusableModel: the file is not a LoRA for this denoiser.
    """
    import torch

    name = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    denoiser = getattr(pipe, name)
    read_header(path)  # says what is wrong with a damaged file
    with reading(path, problem=f"is not a LoRA for this {name}", advice="copy or download it again"):
        layers, alphas = _read(pipe, path, name, denoiser)
    modules = dict(denoiser.named_modules())
    if not layers or any(len(pair) != 2 for pair in layers.values()) or not layers.keys() <= modules.keys():
        unknown = next((layer for layer in layers if layer not in modules), "no layer")
        raise UnusableModel(f"{path} is not a LoRA for this {name} ({unknown}); copy or download it again")
    with torch.no_grad(), reading(path, problem=f"does not fit this {name}"):
        for layer, pair in layers.items():
            weight = modules[layer].weight
            down, up = (pair[key].to(weight.device, torch.float32) for key in ("down", "up"))
            rank = down.shape[0]
            delta = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)  # 1x1 and 3x3 convolutions too
            scale = amount * alphas.get(layer, rank) / rank
            weight.copy_((weight.float() + scale * delta).to(weight.dtype))
    return len(layers)


def _read(
    pipe: Any, path: Path, name: str, denoiser: Any
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Return the pairs of matrices, and alphas that differ from the rank, by the denoiser's module names."""
    from diffusers.utils import convert_unet_state_dict_to_peft
    from safetensors.torch import load_file

    found = type(pipe).lora_state_dict(load_file(path), unet_config=denoiser.config)
    state, alphas = found if isinstance(found, tuple) else (found, None)
    foreign = next((key for key in state if not key.startswith(f"{name}.")), None)
    if foreign is not None:
        raise UnusableModel(f"{path} changes more than the {name} ({foreign}), which vivace does not merge")
    # Alphas are named after their layer, or after one of its matrices, and are then renamed in the same way.
    scales = {key.removesuffix(".alpha"): float(alpha) for key, alpha in (alphas or {}).items()}
    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in convert_unet_state_dict_to_peft(state).items():
        layer, _, role = key.removeprefix(f"{name}.").partition(".lora_")
        layers[layer]["down" if role.startswith("A") else "up"] = value
    renamed = convert_unet_state_dict_to_peft(scales)
    return dict(layers), {
        key.removeprefix(f"{name}.").partition(".lora_")[0]: alpha for key, alpha in renamed.items()
    }
