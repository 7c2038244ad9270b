"""Save SD 1.5 and SDXL in the layout of the original single files: the inverse of diffusers' conversion."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def save_sd15(pipe: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write one file with UNet, VAE and text encoder."""
    return _save(pipe, path, dtype, _clip(pipe.text_encoder, "cond_stage_model.transformer."))


def save_sd2(pipe: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write one file with UNet, VAE and OpenCLIP's text encoder."""
    return _save(pipe, path, dtype, _open_clip(pipe.text_encoder, "cond_stage_model.model."))


def save_sdxl(pipe: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write one file with UNet, VAE and both text encoders."""
    texts = _clip(pipe.text_encoder, "conditioner.embedders.0.transformer.")
    return _save(pipe, path, dtype, texts | _open_clip(pipe.text_encoder_2, "conditioner.embedders.1.model."))


def _save(pipe: Any, path: Path, dtype: torch.dtype, texts: dict[str, torch.Tensor]) -> Path:
    unet = pipe.unet.state_dict()
    state = {f"model.diffusion_model.{_unet(key, unet)}": value for key, value in unet.items()}
    state |= {f"first_stage_model.{key}": value for key, value in original_vae(pipe.vae).items()}
    state |= texts
    save_file({key: value.to(dtype).contiguous() for key, value in state.items()}, path)
    return path


def original_vae(vae: Any) -> dict[str, torch.Tensor]:
    """Return a VAE's tensors in their authors' names."""
    last = len(vae.config.block_out_channels) - 1
    return {_vae(key, last): _conv(key, value) for key, value in vae.state_dict().items()}


def _clip(encoder: Any, prefix: str) -> dict[str, torch.Tensor]:
    state = encoder.state_dict().items()
    return {f"{prefix}text_model.{key.removeprefix('text_model.')}": value for key, value in state}


def _open_clip(encoder: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Join query, key and value into one matrix, and transpose the projection."""
    theirs = {key.removeprefix("text_model."): value for key, value in encoder.state_dict().items()}
    state = {
        # Files of SD 2 have it too, though its encoder does without.
        "text_projection": theirs.get("text_projection.weight", torch.eye(encoder.config.hidden_size)).T,
        "positional_embedding": theirs["embeddings.position_embedding.weight"],
        "token_embedding.weight": theirs["embeddings.token_embedding.weight"],
    }
    names = {
        "self_attn.out_proj": "attn.out_proj",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for end in ("weight", "bias"):
        state[f"ln_final.{end}"] = theirs[f"final_layer_norm.{end}"]
        for i in range(encoder.config.num_hidden_layers):
            layer, original = f"encoder.layers.{i}", f"transformer.resblocks.{i}"
            qkv = [theirs[f"{layer}.self_attn.{part}_proj.{end}"] for part in "qkv"]
            state[f"{original}.attn.in_proj_{end}"] = torch.cat(qkv)
            for ours, name in names.items():
                state[f"{original}.{name}.{end}"] = theirs[f"{layer}.{ours}.{end}"]
    return {prefix + key: value for key, value in state.items()}


def _unet(key: str, state: Mapping[str, Any]) -> str:
    """Return the original name of a UNet key: two layers per level on the way down, three on the way up."""
    for theirs, original in _UNET.items():
        if key.startswith(f"{theirs}."):
            rest = key.removeprefix(theirs)
            return original + (_inside(rest) if "resnets" in theirs else rest)
    side, level, kind, layer, rest = key.split(".", 4)
    i, j = int(level), int(layer)
    if side == "down_blocks":
        number = 3 * i + j + 1 if kind != "downsamplers" else 3 * (i + 1)
        place = {"resnets": "0", "attentions": "1", "downsamplers": "0"}[kind]
        name = f"input_blocks.{number}.{place}"
        rest = rest.replace("conv", "op") if kind == "downsamplers" else rest
    else:
        number = 3 * i + j if kind != "upsamplers" else 3 * i + 2
        has_attention = any(name.startswith(f"up_blocks.{i}.attentions") for name in state)
        place = {"resnets": "0", "attentions": "1", "upsamplers": "2" if has_attention else "1"}[kind]
        name = f"output_blocks.{number}.{place}"
    return name + (_inside(f".{rest}") if kind == "resnets" else f".{rest}")


def _inside(rest: str) -> str:
    _, part, end = rest.split(".", 2)
    return f".{_RESNET[part]}.{end}"


def _vae(key: str, last: int = 3) -> str:
    key = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    key = key.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
    if "mid_block.attentions.0" in key:
        key = key.replace("mid_block.attentions.0", "mid.attn_1")
        return next(key.replace(f".{a}.", f".{b}.") for a, b in _VAE_ATTENTION.items() if f".{a}." in key)
    parts = key.split(".")
    if len(parts) > 2 and parts[1] in ("down_blocks", "up_blocks"):
        side = parts[1].removesuffix("_blocks")
        level = int(parts[2]) if side == "down" else last - int(parts[2])
        kind = {"resnets": f"block.{parts[4]}", "downsamplers": "downsample", "upsamplers": "upsample"}[
            parts[3]
        ]
        return ".".join([parts[0], side, str(level), kind, *parts[5:]])
    return key


def _conv(key: str, value: torch.Tensor) -> torch.Tensor:
    """Turn the VAE's attention into 1x1 convolutions."""
    is_attention = "mid_block.attentions" in key and value.dim() == 2
    return value[:, :, None, None] if is_attention else value
