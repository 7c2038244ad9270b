"""Ovis-Image: FLUX.1's blocks with SwiGLU, and a small language model for the text.

The timestep alone modulates; guidance is a second call, with a negative prompt. Source: diffusers,
OvisImageTransformer2DModel, OvisImagePipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEF1_FILES, Entry, Hub
from vivace.architectures.gains import MODULATION, SILU, double_and_single


def _gains(transformer: Any) -> family.Rules:
    config = transformer.config
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers + config.num_single_layers))
    # Behind SwiGLU; the rest is FLUX.1's.
    return [
        (r"ff(_context)?\.net\.2", SILU * last),
        (r"single_transformer_blocks\.\d+\.proj_out", math.sqrt(5 / 4) * SILU * last),
        *double_and_single(transformer, embedded=1),
    ]


# AIDC-AI/Ovis-Image-7B: the class's default. Its text encoder is Ovis 2.5 2B's, Qwen3 1.7B.
_PARTS = {
    "transformer": components.of_diffusers("OvisImageTransformer2DModel", num_layers=6, num_single_layers=27),
    "vae": components.FLUX_VAE,
    "text_encoder": components.of_transformers(
        "Qwen3Model",
        **components.QWEN3
        | {
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "hidden_size": 2048,
            "intermediate_size": 6144,
        },
        tie_word_embeddings=True,
    ),
}
# Its scheduler was not at hand; it is FLUX.1 [dev]'s, whose shift the pipeline computes too. Steps and guidance are the
# pipeline's defaults.
_ENTRY = Entry(
    name="ovis-image-7b",
    summary="Ovis-Image, 7 B parameters, made to draw text; guidance in a second call",
    licence="Apache-2.0",
    origin=Hub(repo="AIDC-AI/Ovis-Image-7B", tiny_vae=TAEF1_FILES, download_bytes=18_300_000_000),
    pipeline="OvisImagePipeline",
    num_inference_steps=50,
    guidance_scale=5.0,
    max_sequence_length=256,
    arguments={"negative_prompt": ""},
)

OVIS_IMAGE = family.Family(
    name="Ovis-Image",
    denoiser="OvisImageTransformer2DModel",
    pipelines=(family.Pipeline("OvisImagePipeline", max_text_length=256),),
    models=(
        family.PublishedModel(
            _ENTRY,
            components.Architecture.of(
                _ENTRY,
                _PARTS,
                components.of_diffusers(components.FLOW, shift=3.0, use_dynamic_shifting=True),
                {"text_encoder": 284},
                components.TAEF1,
            ),
            title="Ovis-Image",
            labels=r"ovis[ _-]?image",
            step_flop=102_120_350_023_680,
        ),
    ),
    random_weights={"OvisImageTransformer2DModel": family.RandomWeights(_gains)},
    not_by_diffusers="it does not know what they return",
    blocks=family.Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=family.output_of("x_embedder"),
        leaving=family.input_of("norm_out"),
        modulated=family.modulated_by_time,
        grid=family.grid_of_ids,
    ),
)
