"""CogView4: blocks of text and image apart, the image first, and a language model for the text.

Guidance is a second call, with a negative prompt. Source: diffusers, CogView4Transformer2DModel, CogView4Pipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import family
from vivace.architectures.components import FLOW, KL, Architecture, of_diffusers, of_transformers
from vivace.architectures.entry import Entry, Hub
from vivace.architectures.gains import GELU, MODULATED, MODULATION, SILU, SINUSOID, embedders


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    text, timestep = call[0][1:3]
    return block.norm1(image, text, timestep)[0]


def _gains(transformer: Any) -> family.Rules:
    last = 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers))
    return [
        (r"condition_embedder\.linear_1", SINUSOID),
        *embedders(2),
        (r"norm(1|_out)\.linear", MODULATION * SILU),
        (r"ff\.net\.2", GELU * last),
        (r"to_out\.0", last),
        (r"to_[qkv]\.|ff\.net\.0|^proj_out", MODULATED**-0.5),
    ]


# THUDM/glm-4-9b-hf without its head, as text_encoder of CogView4. Its configuration is the class's default.
GLM4_9B = of_transformers("GlmModel", vocab_size=151552, hidden_size=4096, num_hidden_layers=40)
# THUDM/CogView4-6B, as in convert_cogview4_to_diffusers.py.
_VAE = of_diffusers(
    "AutoencoderKL",
    **KL | {"block_out_channels": [128, 512, 1024, 1024], "layers_per_block": 3},
    sample_size=1024,
    latent_channels=16,
    scaling_factor=1.0,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
    mid_block_add_attention=False,
)
# THUDM/CogView4-6B, as in the same script.
_COGVIEW4 = of_diffusers(
    "CogView4Transformer2DModel", num_layers=28, num_attention_heads=32, attention_head_dim=128
)
# Its pipeline computes the shift from the number of tokens.
_SAMPLER = of_diffusers(
    FLOW, base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
)

# Steps and guidance from diffusers' example, the licence from the model's page; the download is counted from the
# parameters in bf16.
_ENTRY = Entry(
    name="cogview4-6b",
    summary="CogView4, 6 B parameters, guidance in a second call, prompts in English or Chinese",
    licence="Apache-2.0",
    origin=Hub(repo="THUDM/CogView4-6B", download_bytes=31_140_000_000),
    pipeline="CogView4Pipeline",
    num_inference_steps=50,
    guidance_scale=3.5,
)
_PARTS = {"transformer": _COGVIEW4, "vae": _VAE, "text_encoder": GLM4_9B}
_MODELS = (
    family.PublishedModel(
        _ENTRY,
        Architecture.of(_ENTRY, _PARTS, _SAMPLER, {"text_encoder": 1024}),
        title="CogView4",
        labels=r"cogview[ _-]?4",
        step_flop=108_245_923_397_632,
    ),
)

COGVIEW4 = family.Family(
    name="CogView4",
    denoiser="CogView4Transformer2DModel",
    pipelines=(family.Pipeline("CogView4Pipeline"),),
    files=family.SingleFiles(
        (family.Signature("CogView", ("patch_embed.text_proj.weight", "time_condition_embed.*")),)
    ),
    models=_MODELS,
    random_weights={
        "CogView4Transformer2DModel": family.RandomWeights(_gains),
    },
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=family.output_of("patch_embed.proj"),
        leaving=family.input_of("norm_out"),
        modulated=_modulated,
        grid=family.grid_of_latents(family.patch_size),
        text=1,
        returns_text_first=False,
    ),
    text_of_any_length=True,
    cells=family.patch_size,
)
