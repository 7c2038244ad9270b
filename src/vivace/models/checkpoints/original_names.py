"""The names of layers in the models' original code, which many trainers keep, by diffusers' names.

`#` is a block's number. Where the original has one layer for several of diffusers', its rows are theirs, one after the
other. Sources: diffusers, loaders/single_file_utils.py; github.com/black-forest-labs/flux; github.com/XLabs-AI/x-flux;
github.com/Stability-AI/sd3.5; github.com/Stability-AI/generative-models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Names = dict[str, tuple[str, ...]]

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


def _in(block: str, names: Names, original: str) -> Names:
    """Return names of one block's layers with the block's own name before them."""
    return {f"{original}.{old}": tuple(f"{block}.{new}" for new in news) for old, news in names.items()}


def _each(**names: str) -> Names:
    return {old.replace("__", "."): (new,) for old, new in names.items()}


_FLUX_ATTENTION: Names = {
    "img_attn.qkv": _QKV,
    "txt_attn.qkv": _ADDED,
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
}
_FLUX_OUTSIDE = _each(
    img_in="x_embedder", txt_in="context_embedder", final_layer__linear="proj_out"
) | {"final_layer.adaLN_modulation.1": ("norm_out.linear",)}  # fmt: skip
_FLUX: Names = (
    _in(
        "transformer_blocks.#",
        _FLUX_ATTENTION
        | {
            "img_mlp.0": ("ff.net.0.proj",),
            "img_mlp.2": ("ff.net.2",),
            "txt_mlp.0": ("ff_context.net.0.proj",),
            "txt_mlp.2": ("ff_context.net.2",),
            "img_mod.lin": ("norm1.linear",),
            "txt_mod.lin": ("norm1_context.linear",),
            "processor.qkv_lora1": _QKV,  # XLabs'
            "processor.qkv_lora2": _ADDED,
            "processor.proj_lora1": ("attn.to_out.0",),
            "processor.proj_lora2": ("attn.to_add_out",),
        },
        "double_blocks.#",
    )
    | _in(
        "single_transformer_blocks.#",
        {
            "linear1": (*_QKV, "proj_mlp"),
            "linear2": ("proj_out",),
            "modulation.lin": ("norm.linear",),
            "norm.query_norm": ("attn.norm_q",),
            "norm.key_norm": ("attn.norm_k",),
            "processor.qkv_lora": _QKV,
            "processor.proj_lora": ("proj_out",),
        },
        "single_blocks.#",
    )
    | _FLUX_OUTSIDE
    | _each(
        time_in__in_layer="time_text_embed.timestep_embedder.linear_1",
        time_in__out_layer="time_text_embed.timestep_embedder.linear_2",
        vector_in__in_layer="time_text_embed.text_embedder.linear_1",
        vector_in__out_layer="time_text_embed.text_embedder.linear_2",
        guidance_in__in_layer="time_text_embed.guidance_embedder.linear_1",
        guidance_in__out_layer="time_text_embed.guidance_embedder.linear_2",
    )
)
_FLUX2: Names = (
    _in(
        "transformer_blocks.#",
        _FLUX_ATTENTION
        | {
            "img_mlp.0": ("ff.linear_in",),
            "img_mlp.2": ("ff.linear_out",),
            "txt_mlp.0": ("ff_context.linear_in",),
            "txt_mlp.2": ("ff_context.linear_out",),
        },
        "double_blocks.#",
    )
    | _in(
        "single_transformer_blocks.#",
        {
            "linear1": ("attn.to_qkv_mlp_proj",),
            "linear2": ("attn.to_out",),
            "norm.query_norm": ("attn.norm_q",),
            "norm.key_norm": ("attn.norm_k",),
        },
        "single_blocks.#",
    )
    | _FLUX_OUTSIDE
    | _each(
        time_in__in_layer="time_guidance_embed.timestep_embedder.linear_1",
        time_in__out_layer="time_guidance_embed.timestep_embedder.linear_2",
        guidance_in__in_layer="time_guidance_embed.guidance_embedder.linear_1",
        guidance_in__out_layer="time_guidance_embed.guidance_embedder.linear_2",
        single_stream_modulation__lin="single_stream_modulation.linear",
        double_stream_modulation_img__lin="double_stream_modulation_img.linear",
        double_stream_modulation_txt__lin="double_stream_modulation_txt.linear",
    )
)
_SD3_BLOCK: Names = {
    "x_block.attn.qkv": _QKV,
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn.ln_q": ("attn.norm_q",),
    "x_block.attn.ln_k": ("attn.norm_k",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.attn2.ln_q": ("attn2.norm_q",),
    "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.attn.qkv": _ADDED,
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
_SD3: Names = (
    _in("transformer_blocks.#", _SD3_BLOCK, "joint_blocks.#")
    | _each(x_embedder__proj="pos_embed.proj", final_layer__linear="proj_out")
    | {
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    }
)
_Z_IMAGE: Names = {
    f"{block}.#.attention.{old}": tuple(f"{block}.#.attention.{new}" for new in news)
    for block in ("layers", "noise_refiner", "context_refiner")
    for old, news in {
        "qkv": ("to_q", "to_k", "to_v"),
        "out": ("to_out.0",),
        "q_norm": ("norm_q",),
        "k_norm": ("norm_k",),
    }.items()
} | {
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}
_ORIGINAL: dict[str, Names] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "SD3Transformer2DModel": _SD3,
    "ZImageTransformer2DModel": _Z_IMAGE,
}
_SWAPPED = "AdaLayerNormContinuous"
"""A class of diffusers that has scale before shift, where the original has shift before scale."""

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_UNET = re.compile(
    r"(?P<side>down_blocks\.(?P<down>\d+)|mid_block|up_blocks\.(?P<up>\d+))"
    r"\.(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<number>\d+)\.(?P<rest>.+)"
)


def original_names(
    kind: str, modules: dict[str, str], layers_per_block: int | None
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Return original names, the layers of diffusers that each is, and whether its halves are swapped.

    Args:
        kind: the denoiser's class.
        modules: the class of each of its modules, by name.
        layers_per_block: of a UNet.
    """
    if layers_per_block is not None:
        for name in modules:
            original = _of_unet(name, modules, layers_per_block)
            if original is not None:
                yield original, (name,), False
    numbers = {int(number) for name in modules for number in re.findall(r"\.(\d+)\.", name)}
    for original, names in _ORIGINAL.get(kind, {}).items():
        for number in sorted(numbers) if "#" in original else (0,):
            layers = tuple(name.replace("#", str(number)) for name in names)
            if all(layer in modules for layer in layers):
                owner = modules.get(layers[0].rpartition(".")[0])
                yield original.replace("#", str(number)), layers, owner == _SWAPPED


def has_original_names(kind: str) -> bool:
    """Whether the original names of a denoiser of this class are known here."""
    return kind in _ORIGINAL or kind in ("UNet2DConditionModel", "QwenImageTransformer2DModel")


def _of_unet(name: str, modules: dict[str, str], layers_per_block: int) -> str | None:
    """Return the name of a UNet's layer in the code of Stable Diffusion; None if it has none."""
    if name in _UNET_OUTSIDE:
        return _UNET_OUTSIDE[name]
    match = _UNET.fullmatch(name)
    if match is None:
        return None
    kind, number, rest = match["kind"], int(match["number"]), match["rest"]
    if kind == "resnets":
        rest = _RESNET.get(rest, rest)
    each = layers_per_block + 1
    if match["down"] is not None:
        first = int(match["down"]) * each + 1
        if kind == "downsamplers":
            return f"input_blocks.{first + layers_per_block}.0.op"
        return f"input_blocks.{first + number}.{int(kind == 'attentions')}.{rest}"
    if match["up"] is not None:
        first = int(match["up"]) * each
        if kind == "upsamplers":
            has_attention = f"{match['side']}.attentions.0" in modules
            return f"output_blocks.{first + layers_per_block}.{1 + has_attention}.conv"
        return f"output_blocks.{first + number}.{int(kind == 'attentions')}.{rest}"
    return f"middle_block.{2 * number + (kind == 'attentions')}.{rest}"
