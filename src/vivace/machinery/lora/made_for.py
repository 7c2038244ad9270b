"""Guess which model a LoRA was made for, from its header or from its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vivace.machinery.families import family_of
from vivace.machinery.lora.forms import Group
from vivace.machinery.technique import component_of

_HEADER = ("modelspec.architecture", "ss_base_model_version", "base_model")
_BY_WIDTH = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "SDXL"}
"""Models by the width of a UNet's text, which its second attentions read."""
_BY_NAME = (
    ("joint_blocks", "Stable Diffusion 3"),
    ("img_mod_1", "Qwen-Image"),
    ("stream_modulation", "FLUX.2"),
    ("img_mod_lin", "FLUX.1"),
    ("modulation_lin", "FLUX.1"),
    ("to_qkv_mlp_proj", "FLUX.2"),
    ("double_blocks", "FLUX"),
    ("single_blocks", "FLUX"),
    ("single_transformer_blocks", "FLUX"),
    ("feed_forward", "Z-Image"),
    ("caption_projection", "Sana"),
    ("output_blocks", "a UNet"),
    ("up_blocks", "a UNet"),
)


def made_for(
    metadata: Mapping[str, Any], pipe: Any, foreign: Sequence[Group], misfits: Sequence[Group]
) -> str:
    """Return ": it was made for X, and this is Y", or "" if unknown.

    Args:
        metadata: of the file's header.
        foreign: the groups whose layers the pipeline lacks.
        misfits: those whose layers have other sizes.
    """
    stated = next((str(metadata[name])[:80] for name in _HEADER if metadata.get(name)), "")
    if stated and _letters(_this(pipe)) not in _letters(stated):
        return f": its header says {stated}, and this is {_this(pipe)}"
    model = _by_width([*foreign, *misfits]) or _by_name(foreign)
    denoiser = type(component_of(pipe, "denoiser")).__name__
    if not model or _this(pipe).startswith(model) or (model == "a UNet" and model[2:] in denoiser):
        return ""
    return f": its layers are those of {model}, and this is {_this(pipe)}"


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _by_width(groups: Sequence[Group]) -> str:
    for group in groups:
        name = group.layer.replace(".", "_")
        down = group.tensors.get("down")
        if name.endswith(("attn2_to_k", "attn2_to_v")) and down is not None and down.dim() >= 2:
            return _BY_WIDTH.get(down.shape[1], "")
    return ""


def _by_name(groups: Sequence[Group]) -> str:
    names = [group.layer.replace(".", "_") for group in groups]
    return next((model for part, model in _BY_NAME if any(part in name for name in names)), "")


def _this(pipe: Any) -> str:
    denoiser = component_of(pipe, "denoiser")
    family = family_of(denoiser)
    if family is None:
        return f"a {type(denoiser).__name__}"
    width = getattr(denoiser, "config", {}).get("cross_attention_dim")
    return str(_BY_WIDTH.get(width, family.name) if isinstance(width, int) else family.name)
