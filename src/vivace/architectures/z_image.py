"""Z-Image: a few refining blocks for image and text apart, then one stream of both, the image first.

The transformer takes a list of latents and a list of texts, and returns a list. Guidance adds the unconditional texts
to these lists, behind the conditional ones. Source: diffusers, ZImageTransformer2DModel, ZImagePipeline.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEF1_FILES, Embedded, Entry, Hub, embedded_entry
from vivace.architectures.gains import MODULATION, SCALED, SILU, SINUSOID


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    modulation = call[0][3]  # after the tokens, their mask and positions
    scale = block.adaLN_modulation(modulation).unsqueeze(1).chunk(4, dim=2)[0]
    return block.attention_norm1(image) * (1.0 + scale)


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    args, kwargs = call
    latents = (args[0] if args else kwargs["x"])[0]  # (channels, frames, height, width)
    return latents.shape[-2] // 2, latents.shape[-1] // 2


def _gains(transformer: Any) -> family.Rules:
    scaled = SCALED**-0.5
    return [
        (r"t_embedder\.mlp\.0", SINUSOID),
        (r"t_embedder\.mlp\.2", SILU),
        (r"final_layer.*adaLN_modulation", MODULATION * SILU),
        (r"adaLN_modulation", MODULATION),
        (r"feed_forward\.w2", SILU),
        (r"to_[qkv]\.|feed_forward\.w[13]|final_layer.*linear", scaled),
    ]


def _norms(transformer: Any) -> family.Rules:
    """Its branches end with a norm."""
    return [(r"(attention|ffn)_norm2", 1 / (MODULATION * math.sqrt(2 * transformer.config.n_layers)))]


# Qwen/Qwen3-4B without its head, as text_encoder of Z-Image.
QWEN3_4B_BODY = components.of_transformers("Qwen3Model", **components.QWEN3_4B)
# Tongyi-MAI/Z-Image-Turbo
Z_IMAGE_6B = components.of_diffusers(
    "ZImageTransformer2DModel", dim=3840, n_layers=30, n_heads=30, n_kv_heads=30, axes_lens=[1536, 512, 512]
)
_SHIFTED = components.of_diffusers(components.FLOW, shift=3.0)


# DistilledModel to 8 steps, without guidance. Its card asks for 9, and says that the transformer is called 8 times;
# diffusers 0.42.1 calls it 9 times.
_TURBO = Entry(
    name="z-image-turbo",
    summary="Z-Image-Turbo, 6 B parameters, distilled to 8 steps",
    licence="Apache-2.0",
    origin=Hub(repo="Tongyi-MAI/Z-Image-Turbo", tiny_vae=TAEF1_FILES, download_bytes=20_520_000_000),
    pipeline="ZImagePipeline",
    num_inference_steps=9,
    guidance_scale=0.0,
    max_sequence_length=512,
)
_PARTS = {"transformer": Z_IMAGE_6B, "vae": components.FLUX_VAE, "text_encoder": QWEN3_4B_BODY}
_MODELS = (
    family.PublishedModel(
        embedded_entry(
            name="tiny-z-image",
            summary="Z-Image's architecture, small: blocks of one stream, with guidance",
            origin=Embedded(folder="tiny-z-image", base="tiny-flux", tiny_vae="tiny-flux-tiny-vae"),
            pipeline="ZImagePipeline",
            size_multiple=16,
            num_inference_steps=28,
            guidance_scale=3.0,
        )
    ),
    family.PublishedModel(
        _TURBO,
        components.Architecture.of(_TURBO, _PARTS, _SHIFTED, {"text_encoder": 512}, components.TAEF1),
        title="Z-Image-Turbo",
        labels=r"z[ _-]?image[ _-]?turbo",
        step_flop=55_120_597_221_376,
    ),
)


def _embeddings(
    pipe: Any,
    prompt: str | list[str],
    device: Any = None,
    prompt_embeds: Any = None,
    max_sequence_length: int = 512,
) -> Any:
    """ZImagePipeline._encode_prompt: a row per prompt of as many embeddings as the prompt has tokens."""
    if prompt_embeds is not None:
        return prompt_embeds
    prompts = [prompt] if isinstance(prompt, str) else prompt
    texts = [
        pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        for text in prompts
    ]
    tokens = pipe.tokenizer(
        texts, padding="max_length", max_length=max_sequence_length, truncation=True, return_tensors="pt"
    )
    ids = tokens.input_ids.to("meta")
    hidden = pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2]
    lengths = tokens.attention_mask.sum(dim=1).tolist()
    return [hidden[row][:length].clone() for row, length in enumerate(lengths)]


def _run_without_values(pipe: Any, height: int, width: int) -> None:
    pipe._encode_prompt = functools.partial(_embeddings, pipe)


_NAMES: family.Names = {
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
_OTHER_SIZE = "Z-Image of a size that vivace does not know, or written with other shapes"
_FILES = family.SingleFiles(
    (
        family.Signature(
            "Z-Image",
            ("cap_embedder.0.weight", "layers.0.adaLN_modulation.0.weight", "x_embedder.weight"),
            (("x_embedder.weight", 0, 3840),),
            "z-image-turbo",
            "transformer",
            note="no tensor says whether it is distilled: read as Z-Image Turbo, which draws in 9 steps",
        ),
        family.Signature(_OTHER_SIZE, ("cap_embedder.*", "noise_refiner.0.adaLN_modulation.0.weight")),
        family.Signature(_OTHER_SIZE, ("cap_embedder.*", "layers.0.adaLN_modulation.0.weight")),
    ),
    supported=("Z-Image",),
    unused=("norm_final.weight",),
)


Z_IMAGE = family.Family(
    name="Z-Image",
    denoiser="ZImageTransformer2DModel",
    pipelines=(
        family.Pipeline(
            "ZImagePipeline",
            tasks={"image": "ZImageImg2ImgPipeline", "inpaint": "ZImageInpaintPipeline"},
            reads_padding=False,
            run_without_values=_run_without_values,
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(_NAMES, keeps_others=True),
    lora_layers=("feed_forward",),
    models=_MODELS,
    random_weights={
        "ZImageTransformer2DModel": family.RandomWeights(_gains, _norms),
    },
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("layers",),
        entering=family.returned_by("_build_unified_sequence"),
        leaving=family.input_of("all_final_layer.2-1"),
        modulated=_modulated,
        grid=_grid,
        text=None,
        added_between=("controlnet_block_samples",),
        outside="the refining blocks",
    ),
    doubled=family.BatchDoubling(off=0.0),
    rows_in_lists=True,
    pads_captions=True,
    fused="z_image",
)
