"""ERNIE-Image: one stream of image and text, the image first, in blocks that share one modulation.

Blocks take tokens as (tokens, batch, channels). Guidance doubles the batch, the negative prompt first; texts are padded
to the longest of a batch, and masked. Source: diffusers, ErnieImageTransformer2DModel, ErnieImagePipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import family
from vivace.architectures.components import FLOW, Architecture, of_diffusers, of_transformers, rope
from vivace.architectures.entry import TAEF2_FILES, Entry, Hub
from vivace.architectures.flux2 import FLUX2_VAE
from vivace.architectures.gains import GELU, MODULATED, MODULATION, SILU, SINUSOID


def _entering(transformer: Any, note: family.Note) -> family.Handle:
    """Watch the tokens of the image and of the text, which the transformer joins, (batch, tokens, channels)."""
    image: list[Any] = []

    def joined(text: Any) -> None:
        import torch

        note(torch.cat([image.pop(), text], dim=1))

    handles = (
        family.output_of("x_embedder")(transformer, image.append),
        family.output_of("text_proj")(transformer, joined),
    )
    return family.Handles(handles)


def _leaving(transformer: Any, note: family.Note) -> family.Handle:
    return family.input_of("final_norm")(transformer, lambda tokens: note(tokens.transpose(0, 1)))


def _modulated(block: Any, tokens: Any, call: family.Arguments) -> Any:
    shift, scale = (vector[0][:, None] for vector in call[0][2][:2])  # the same for each token
    return block.adaLN_sa_ln(tokens) * (1 + scale) + shift


def _run_without_values(pipe: Any, _: int, __: int) -> None:
    """Pad texts by their shapes, where the pipeline reads their lengths from a tensor; positions are within autocast,
    which takes no meta device."""
    positions = pipe.transformer.pos_embed
    positions.forward = lambda ids: ids.new_empty((*ids.shape[:2], 1, positions.dim))

    def pad_text(text_hiddens: list[Any], device: Any, dtype: Any, text_in_dim: int) -> tuple[Any, Any]:
        import torch

        lengths = [len(text) for text in text_hiddens]
        text = torch.zeros((len(lengths), max(lengths), text_in_dim), device="meta", dtype=dtype)
        return text, torch.tensor(lengths, device="meta")

    pipe._pad_text = pad_text


def _gains(transformer: Any) -> family.Rules:
    last = 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers))
    return [
        (r"time_embedding\.linear_1", SINUSOID),
        (r"time_embedding\.linear_2", SILU),
        (r"adaLN_modulation\.1", MODULATION * SILU),
        (r"final_norm\.linear", MODULATION),
        (r"to_out\.0", last),
        (r"linear_fc2", GELU * last),
        (r"to_[qkv]\.|(gate|up)_proj|final_linear", MODULATED**-0.5),
    ]


# baidu/ERNIE-Image and ERNIE-Image-Turbo, as public copies quote them: the transformer, the scheduler, and Ministral 3
# 3B without its head. Its positions are stretched beyond 16,384 tokens (YaRN), which no prompt has.
_TRANSFORMER = of_diffusers(
    "ErnieImageTransformer2DModel",
    hidden_size=4096,
    num_attention_heads=32,
    num_layers=36,
    ffn_hidden_size=12288,
    text_in_dim=3072,
)
_MINISTRAL_3B = of_transformers(
    "Mistral3Model",
    text_config={
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": rope(1_000_000.0),
    },
    vision_config={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    tie_word_embeddings=True,
)
_SAMPLER = of_diffusers(FLOW, shift=4.0, use_dynamic_shifting=False)


def _publish(
    name: str, repo: str, title: str, labels: str, step_flop: int, **own: Any
) -> family.PublishedModel:
    entry = Entry(
        name=name,
        licence="Apache-2.0",
        # Without the language model that rewrites prompts, 3 B parameters more; a benchmark's prompt is meant as it is.
        origin=Hub(
            repo=f"baidu/{repo}",
            without=("pe", "pe_tokenizer"),
            tiny_vae=TAEF2_FILES,
            download_bytes=24_000_000_000,
        ),
        pipeline="ErnieImagePipeline",
        **own,
    )
    parts = {"transformer": _TRANSFORMER, "vae": FLUX2_VAE, "text_encoder": _MINISTRAL_3B}
    architecture = Architecture.of(entry, parts, _SAMPLER, {"text_encoder": 512})
    return family.PublishedModel(entry, architecture, title, labels, step_flop)


# Steps and guidance are the pipeline's defaults; of Turbo 8 steps, as its card says, and none.
_MODELS = (
    _publish(
        "ernie-image",
        "ERNIE-Image",
        "ERNIE-Image",
        r"ernie[ _-]?image(?!.*turbo)",
        148_616_431_796_224,
        summary="ERNIE-Image, 8 B parameters, one stream of image and text; guidance doubles the batch",
        num_inference_steps=50,
        guidance_scale=4.0,
        arguments={"use_pe": False, "negative_prompt": ""},
    ),
    _publish(
        "ernie-image-turbo",
        "ERNIE-Image-Turbo",
        "ERNIE-Image-Turbo",
        r"ernie[ _-]?image.*turbo",
        74_308_215_898_112,
        summary="ERNIE-Image-Turbo, 8 B parameters, distilled to 8 steps without guidance",
        num_inference_steps=8,
        guidance_scale=1.0,
        arguments={"use_pe": False},
    ),
)

ERNIE_IMAGE = family.Family(
    name="ERNIE-Image",
    denoiser="ErnieImageTransformer2DModel",
    pipelines=(family.Pipeline("ErnieImagePipeline", run_without_values=_run_without_values),),
    models=_MODELS,
    random_weights={"ErnieImageTransformer2DModel": family.RandomWeights(_gains)},
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("layers",),
        entering=_entering,
        leaving=_leaving,
        modulated=_modulated,
        grid=family.grid_of_latents(family.patch_size),
        text=None,
        tokens_first=True,
    ),
    doubled=family.BatchDoubling(off=1.0),
    text_of_any_length=True,
    cells=lambda _: 2,
    fused="ernie_image",
)
