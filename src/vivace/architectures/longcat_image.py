"""LongCat-Image: FLUX.1's blocks with half as many of each kind, and a language model for the text.

The timestep alone modulates; guidance is a second call, with a negative prompt. Prompts are padded to 512 tokens, whose
positions come before the image's. Source: diffusers, LongCatImageTransformer2DModel, LongCatImagePipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures import family
from vivace.architectures.components import FLOW, FLUX_VAE, TAEF1, Architecture, of_diffusers
from vivace.architectures.entry import TAEF1_FILES, Entry, Hub
from vivace.architectures.gains import double_and_single
from vivace.architectures.qwen_image import QWEN25_VL_7B

_IMAGE = 1
"""The first of the three positions of the image's tokens; of the text's it is 0, of an image to be edited 2."""


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    """Return the grid, whose positions begin behind the text's; ValueError where they are no whole image's."""
    ids = call[1]["img_ids"]
    own = ids[ids[:, 0] == _IMAGE][:, 1:].long()
    rows, columns = (int(own[:, axis].max() - own[:, axis].min()) + 1 for axis in (0, 1))
    if rows * columns != len(own):
        raise ValueError(f"the ids of the {len(own)} image tokens are not those of an image, row by row")
    return rows, columns


def _gains(transformer: Any) -> family.Rules:
    return double_and_single(transformer, embedded=1)


# meituan-longcat/LongCat-Image: 10 and 20 blocks, as its card and public copies of its configuration say.
_TRANSFORMER = of_diffusers("LongCatImageTransformer2DModel", num_layers=10, num_single_layers=20)
# FLUX.1 [dev]'s scheduler, as copies of its repository quote.
_SAMPLER = of_diffusers(FLOW, shift=3.0, use_dynamic_shifting=True)
# Steps and guidance are the pipeline's defaults, and its examples'. Before a prompt is encoded, the pipeline has its
# language model rewrite it; a benchmark's prompt is meant as it is.
_ENTRY = Entry(
    name="longcat-image",
    summary="LongCat-Image, 6 B parameters, FLUX.1's blocks; guidance in a second call",
    licence="Apache-2.0",
    origin=Hub(repo="meituan-longcat/LongCat-Image", tiny_vae=TAEF1_FILES, download_bytes=29_300_000_000),
    pipeline="LongCatImagePipeline",
    num_inference_steps=50,
    guidance_scale=4.5,
    arguments={"enable_prompt_rewrite": False, "negative_prompt": ""},
)
_PARTS = {"transformer": _TRANSFORMER, "vae": FLUX_VAE, "text_encoder": QWEN25_VL_7B}

LONGCAT_IMAGE = family.Family(
    name="LongCat-Image",
    denoiser="LongCatImageTransformer2DModel",
    pipelines=(family.Pipeline("LongCatImagePipeline", last_text_state=-1),),
    models=(
        family.PublishedModel(
            _ENTRY,
            Architecture.of(_ENTRY, _PARTS, _SAMPLER, {"text_encoder": 512}, TAEF1),
            title="LongCat-Image",
            labels=r"long[ _-]?cat[ _-]?image(?!.*edit)",
            step_flop=78_311_681_163_264,
        ),
    ),
    random_weights={"LongCatImageTransformer2DModel": family.RandomWeights(_gains)},
    not_by_diffusers="it does not know what they return",
    blocks=family.Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=family.output_of("x_embedder"),
        leaving=family.input_of("norm_out"),
        modulated=family.modulated_by_time,
        grid=_grid,
    ),
    fused="longcat_image",
)
