"""Stable Diffusion 3 and 3.5: blocks of text and image apart; of 3.5 Medium some attend to the image once more.

Source: diffusers, SD3Transformer2DModel, StableDiffusion3Pipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import VAE_FILES, Entry, Hub, StoredPart
from vivace.architectures.flux import ADDED, QKV
from vivace.architectures.gains import GELU, MODULATED, MODULATION, SILU, embedders


def _gains(transformer: Any) -> family.Rules:
    config = transformer.config
    branches = 2 * config.num_layers + len(config.dual_attention_layers)
    last = 1 / (MODULATION * math.sqrt(branches))  # each branch is multiplied by its gate
    return [
        *embedders(2),
        (r"norm(1|1_context|_out)\.linear", MODULATION * SILU),
        (r"ff(_context)?\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|ff(_context)?\.net\.0|^proj_out", MODULATED**-0.5),
    ]


# stabilityai/stable-diffusion-3.5-large, -medium
SD3_VAE = components.of_diffusers(
    "AutoencoderKL",
    **components.KL,
    sample_size=1024,
    latent_channels=16,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
# Its text encoder reads the projected vector.
_CLIP_L = components.reconfigure(components.CLIP_L).model_copy(
    update={"class_name": "CLIPTextModelWithProjection"}
)
_SD3: dict[str, Any] = {
    "sample_size": 128,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
SD35_LARGE = components.of_diffusers(
    "SD3Transformer2DModel",
    **_SD3,
    num_layers=38,
    num_attention_heads=38,
    caption_projection_dim=2432,
    pos_embed_max_size=192,
)
# Its first 13 blocks have a second attention, over the image alone.
SD35_MEDIUM = components.of_diffusers(
    "SD3Transformer2DModel",
    **_SD3,
    num_layers=24,
    num_attention_heads=24,
    caption_projection_dim=1536,
    pos_embed_max_size=384,
    dual_attention_layers=list(range(13)),
)
_SHIFTED = components.of_diffusers(components.FLOW, shift=3.0)


def _publish(
    name: str,
    title: str,
    transformer: components.ComponentConfig,
    *,
    parameters: str,
    labels: str,
    step_flop: int,
    download_bytes: int,
    **own: Any,
) -> family.PublishedModel:
    # The commit of its tiny VAE is not known.
    tiny_vae = StoredPart(repo="madebyollin/taesd3", revision="main", files=VAE_FILES)
    entry = Entry(
        name=name,
        summary=f"Stable Diffusion {title.removeprefix('SD ')}, {parameters} parameters",
        licence="Stability AI Community",
        gated=True,
        origin=Hub(
            repo=f"stabilityai/stable-diffusion-3.5-{title.split()[-1].lower()}",
            tiny_vae=tiny_vae,
            download_bytes=download_bytes,
        ),
        pipeline="StableDiffusion3Pipeline",
        max_sequence_length=256,
        **own,
    )
    parts = {
        "transformer": transformer,
        "vae": SD3_VAE,
        "text_encoder": _CLIP_L,
        "text_encoder_2": components.OPEN_CLIP_BIGG,
        "text_encoder_3": components.T5_XXL,
    }
    lengths = {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": 256}
    return family.PublishedModel(
        entry,
        components.Architecture.of(entry, parts, _SHIFTED, lengths, components.TAEF1),
        title,
        labels,
        step_flop,
    )


_MODELS = (
    # Steps and guidance from the announcement in diffusers' blog ("Diffusers welcomes Stable Diffusion 3.5 Large").
    _publish(
        "sd35-large",
        "SD 3.5 Large",
        SD35_LARGE,
        parameters="8 B",
        labels=r"(?:sd|diffusion)[ -]?3\.?5[ -]?large(?!.*turbo)",
        step_flop=62_242_229_815_296,
        download_bytes=27_440_000_000,
        num_inference_steps=28,
        guidance_scale=3.5,
        max_size=3072,  # its table of positions ends there
    ),
    # The card's example has 40 steps and guidance 4.5; not checked.
    _publish(
        "sd35-medium",
        "SD 3.5 Medium",
        SD35_MEDIUM,
        parameters="2.2 B",
        labels=r"(?:sd|diffusion)[ -]?3\.?5[ -]?medium",
        step_flop=22_499_147_415_552,
        download_bytes=15_820_000_000,
        num_inference_steps=40,
        guidance_scale=4.5,
    ),
)


# The names in github.com/Stability-AI/sd3.5.
_BLOCK: family.Names = {
    "x_block.attn.qkv": QKV,
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
    "context_block.attn.qkv": ADDED,
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
_NAMES: family.Names = {
    **family.in_block("transformer_blocks.#", "joint_blocks.#", _BLOCK),
    "x_embedder.proj": ("pos_embed.proj",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
}
_TENSORS = {
    "pos_embed.pos_embed": "pos_embed",
    "context_embedder.weight": "context_embedder.weight",
    "context_embedder.bias": "context_embedder.bias",
}
_HAS = ("joint_blocks.0.x_block.attn.ln_q.weight", "x_embedder.proj.weight")
_FILES = family.SingleFiles(
    (
        family.Signature(
            "SD 3.5 Large", _HAS, (("x_embedder.proj.weight", 0, 2432),), "sd35-large", "transformer"
        ),
        family.Signature(
            "SD 3.5 Medium",
            (*_HAS, "joint_blocks.0.x_block.attn2.qkv.weight"),
            (("x_embedder.proj.weight", 0, 1536),),
            "sd35-medium",
            "transformer",
        ),
        family.Signature(
            "SD 3, or SD 3.5 of a size that vivace does not know, or written with other shapes",
            ("joint_blocks.0.*",),
        ),
    ),
    supported=("SD 3.5",),
)


SD3 = family.Family(
    name="Stable Diffusion 3",
    denoiser="SD3Transformer2DModel",
    pipelines=(
        family.Pipeline(
            "StableDiffusion3Pipeline",
            tasks={"image": "StableDiffusion3Img2ImgPipeline", "inpaint": "StableDiffusion3InpaintPipeline"},
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(_NAMES, tensors=_TENSORS),
    lora_layers=("joint_blocks",),
    distilled=(
        family.DistilledFile("sd35-large", "turbo", {"num_inference_steps": 4, "guidance_scale": 0.0}),
    ),
    models=_MODELS,
    random_weights={
        "SD3Transformer2DModel": family.RandomWeights(_gains),
    },
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=family.output_of("pos_embed"),
        leaving=family.input_of("norm_out"),
        modulated=family.modulated_by_time,
        grid=family.grid_of_latents(family.patch_size),
        added_between=("block_controlnet_hidden_states",),
    ),
    doubled=family.BatchDoubling(),
    cells=family.patch_size,
    fused="sd3",
)
