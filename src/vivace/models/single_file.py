"""Identify a checkpoint in a single .safetensors or .gguf file in its authors' layout by its tensors' names.

Such a file has weights but no configuration and no tokenizers; those come from the catalogue model of the same family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.foreign.reading import reading
from vivace.models.gguf_file import SUFFIX
from vivace.models.headers import read_header

_UNET = "model.diffusion_model."
_FLUX_BLOCK = "double_blocks.0.img_attn.norm.key_norm.scale"
_SUPPORTED = "supported are single files of SD 1.5, SDXL and FLUX.1"


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    entry: catalogue name of the model with the same configuration.
    component: the only component in the file; None for a whole pipeline.
    """

    entry: str
    component: str | None = None


def contents_of(path: Path) -> Contents:
    """Identify the contents of a checkpoint by its header.

    Raises:
        UnusableModel: it is damaged, or not a supported model.
        Unsupported: it is a GGUF file, and the package gguf is not installed.
    """
    header = read_header(path)
    with reading(path, problem="is not a model that vivace knows", advice=_SUPPORTED):
        found = _contents_of(path, header)
    if path.suffix == SUFFIX and found.component is None:
        raise UnusableModel(
            f"{path} holds a whole pipeline; GGUF files are supported only for FLUX.1's transformer"
        )
    return found


def _contents_of(path: Path, tensors: dict[str, Any]) -> Contents:
    if any(part in name for name in tensors for part in ("lora_", ".lora.", "lokr_", "hada_w")):
        raise UnusableModel(f"{path} is a LoRA, not a model; {_SUPPORTED}")
    if any(name.endswith("scaled_fp8") for name in tensors):
        raise UnusableModel(f"{path} has scaled fp8 weights, which diffusers does not read; {_SUPPORTED}")
    for prefix in ("", _UNET):
        if prefix + _FLUX_BLOCK in tensors:
            return _flux(path, tensors, prefix)
    is_whole = any(name.startswith("first_stage_model.") for name in tensors)
    first = tensors.get(f"{_UNET}input_blocks.0.0.weight")
    if first is not None and is_whole:
        return _unet(path, tensors, first)
    raise UnusableModel(f"{path} is {_describe_incomplete(tensors)}; {_SUPPORTED}")


def _unet(path: Path, tensors: dict[str, Any], first: dict[str, Any]) -> Contents:
    num_channels = first["shape"][1]
    if num_channels != 4:
        kind = {9: "an inpainting model", 8: "an image editing model"}.get(
            num_channels, "another kind of model"
        )
        raise UnusableModel(f"{path} is {kind}, not a text-to-image model; {_SUPPORTED}")
    if "conditioner.embedders.1.model.positional_embedding" in tensors:
        return Contents("playground" if "edm_mean" in tensors else "sdxl")
    if "conditioner.embedders.0.model.positional_embedding" in tensors:
        raise UnusableModel(f"{path} is SDXL's refiner, which refines images of another model; {_SUPPORTED}")
    if "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight" in tensors:
        return Contents("sd15")
    if "cond_stage_model.model.positional_embedding" in tensors:
        raise UnusableModel(
            f"{path} is an SD 2 model; give it as a folder in diffusers' format ({_SUPPORTED})"
        )
    raise UnusableModel(f"{path} has no text encoder that vivace knows; {_SUPPORTED}")


def _flux(path: Path, tensors: dict[str, Any], prefix: str) -> Contents:
    num_inputs = tensors[f"{prefix}img_in.weight"]["shape"][1] if f"{prefix}img_in.weight" in tensors else 0
    if num_inputs != 64:
        raise UnusableModel(f"{path} is a FLUX.1 variant with inputs other than text; {_SUPPORTED}")
    entry = "flux-dev" if f"{prefix}guidance_in.in_layer.weight" in tensors else "flux-schnell"
    has = {
        part
        for part in ("text_encoders.clip_l.", "text_encoders.t5xxl.", "vae.")
        if _any_below(tensors, part)
    }
    if len(has) == 3:
        return Contents(entry)
    return Contents(entry, "transformer")


def _any_below(tensors: dict[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in tensors)


def _describe_incomplete(tensors: dict[str, Any]) -> str:
    """Describe a file that is not a complete model."""
    if _any_below(tensors, _UNET):
        return "a UNet without its VAE and text encoders"
    if _any_below(tensors, "down_blocks.") or _any_below(tensors, "transformer_blocks."):
        return "one component in diffusers' layout; give the folder of the whole pipeline"
    if _any_below(tensors, "decoder.") or _any_below(tensors, "first_stage_model."):
        return "a VAE alone"
    if _any_below(tensors, "text_model.") or _any_below(tensors, "encoder.block."):
        return "a text encoder alone"
    return "not a model that vivace knows"
