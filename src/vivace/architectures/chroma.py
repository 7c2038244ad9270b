"""Chroma: FLUX.1's blocks, whose modulations one small network makes of the timestep.

It was made of FLUX.1 [schnell], without the pooled text and the guidance input. Guidance is a second call, with a
negative prompt. Source: diffusers, ChromaTransformer2DModel, ChromaPipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEF1_FILES, Entry, Hub
from vivace.architectures.flux import NAMES
from vivace.architectures.gains import MODULATION, SILU, SINUSOID, double_and_single


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    return block.norm1(image, emb=call[1]["temb"][:, :6])[0]


def _gains(transformer: Any) -> family.Rules:
    layers = transformer.config.approximator_layers
    return [
        (r"distilled_guidance_layer\.in_proj", SINUSOID),
        (r"distilled_guidance_layer\.layers\.\d+\.linear_2", SILU / math.sqrt(layers)),
        # Its residual stream's variance has about doubled.
        (r"distilled_guidance_layer\.out_proj", MODULATION * math.sqrt(0.5)),
        *double_and_single(transformer, embedded=1),
    ]


# lodestones/Chroma1-HD: the class's default. Its scheduler was not at hand; it is FLUX.1 [schnell]'s.
_PARTS = {
    "transformer": components.of_diffusers("ChromaTransformer2DModel", num_layers=19, num_single_layers=38),
    "vae": components.FLUX_VAE,
    "text_encoder": components.T5_XXL,
}
_SAMPLER = components.of_diffusers(components.FLOW, shift=1.0, use_dynamic_shifting=False)
# Steps and guidance of diffusers' documentation; the pipeline's defaults are 35 and 5.
_ENTRY = Entry(
    name="chroma1-hd",
    summary="Chroma1-HD, 8.9 B parameters, made of FLUX.1 [schnell]; guidance in a second call",
    licence="Apache-2.0",
    origin=Hub(repo="lodestones/Chroma1-HD", tiny_vae=TAEF1_FILES, download_bytes=27_500_000_000),
    pipeline="ChromaPipeline",
    num_inference_steps=40,
    guidance_scale=3.0,
    max_sequence_length=512,
    arguments={"negative_prompt": ""},
)

_GUIDANCE = "distilled_guidance_layer"
_NAMES: family.Names = NAMES | {
    f"{_GUIDANCE}.in_proj": (f"{_GUIDANCE}.in_proj",),
    f"{_GUIDANCE}.layers.#.in_layer": (f"{_GUIDANCE}.layers.#.linear_1",),
    f"{_GUIDANCE}.layers.#.out_layer": (f"{_GUIDANCE}.layers.#.linear_2",),
    f"{_GUIDANCE}.norms.#": (f"{_GUIDANCE}.norms.#",),
    f"{_GUIDANCE}.out_proj": (f"{_GUIDANCE}.out_proj",),
}
_FILES = family.SingleFiles(
    (
        family.Signature("Chroma (Radiance), which draws pixels", (f"{_GUIDANCE}.*", "nerf_*")),
        family.Signature(
            "Chroma",
            (f"{_GUIDANCE}.*", "double_blocks.0.img_attn.qkv.weight"),
            (("img_in.weight", 0, 3072),),
            "chroma1-hd",
            "transformer",
        ),
        family.Signature(
            "Chroma of a size that vivace does not know, or written with other shapes", (f"{_GUIDANCE}.*",)
        ),
    ),
    supported=("Chroma",),
    contains=("FLUX.1",),
)

CHROMA = family.Family(
    name="Chroma",
    denoiser="ChromaTransformer2DModel",
    pipelines=(
        family.Pipeline(
            "ChromaPipeline",
            tasks={"image": "ChromaImg2ImgPipeline", "inpaint": "ChromaInpaintPipeline"},
            max_text_length=512,
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(_NAMES),
    lora_layers=("distilled_guidance_layer",),
    models=(
        family.PublishedModel(
            _ENTRY,
            components.Architecture.of(_ENTRY, _PARTS, _SAMPLER, {"text_encoder": 512}, components.TAEF1),
            title="Chroma1-HD",
            labels=r"chroma(?!.*(?:radiance|flash|dct))",
            step_flop=149_138_995_937_280,
        ),
    ),
    random_weights={"ChromaTransformer2DModel": family.RandomWeights(_gains)},
    not_by_diffusers="it does not know what they return",
    blocks=family.Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=family.output_of("x_embedder"),
        leaving=family.input_of("norm_out"),
        modulated=_modulated,
        grid=family.grid_of_ids,
        joined=("single_transformer_blocks",),
        are_counted=True,
        added_between=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    fused="chroma",
)
