"""FLUX.2 [dev] and [klein]: FLUX.1's blocks, which share one modulation per kind, and a language model for the text.

Of [dev], guidance is an input of the transformer. [klein] is distilled without guidance; its base models guide with a
second call. Source: diffusers, Flux2Transformer2DModel, Flux2Pipeline, Flux2KleinPipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEF2_FILES, Entry, FewSteps, Hub, SamplerEntry, StoredPart
from vivace.architectures.flux import ATTENTION_NAMES, OUTSIDE_NAMES
from vivace.architectures.gains import MODULATED, MODULATION, SILU, embedders, vae_gains


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    modulation = call[1]["temb_mod_img"]
    if modulation.ndim == 2:
        modulation = modulation.unsqueeze(1)
    shift, scale = modulation.chunk(6, dim=-1)[:2]
    return (1 + scale) * block.norm1(image) + shift


def _gains(transformer: Any) -> family.Rules:
    config = transformer.config
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers + config.num_single_layers))
    # The MLP's part of a single block's input to `to_out`; the attention's part is far smaller.
    share = config.mlp_ratio / (1 + config.mlp_ratio)
    return [
        *embedders(2 if config.guidance_embeds else 1),
        (r"modulation(_img|_txt)?\.linear|norm_out\.linear", MODULATION * SILU),
        (r"linear_out", SILU * last),
        (r"single_transformer_blocks\.\d+\.attn\.to_out", SILU * last / math.sqrt(share)),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|linear_in|to_qkv_mlp_proj|^proj_out", MODULATED**-0.5),
    ]


# Qwen/Qwen3-4B and Qwen3-8B, as text_encoder of FLUX.2 [klein] 4B and 9B.
_QWEN3_4B = components.of_transformers("Qwen3ForCausalLM", **components.QWEN3_4B)
_QWEN3_8B = components.of_transformers(
    "Qwen3ForCausalLM", **components.QWEN3, hidden_size=4096, intermediate_size=12288
)
# mistralai/Mistral-Small-3.2-24B-Instruct-2506, as text_encoder of FLUX.2 [dev]; its vision tower is not called.
MISTRAL_SMALL_24B = components.of_transformers(
    "Mistral3ForConditionalGeneration",
    text_config={
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": components.rope(1_000_000_000.0),
    },
    vision_config={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    tie_word_embeddings=False,
)
# black-forest-labs/FLUX.2-dev: 32 channels, normalised by running statistics where others have a scaling factor.
FLUX2_VAE = components.of_diffusers(
    "AutoencoderKLFlux2", **components.KL, sample_size=1024, latent_channels=32
)
# black-forest-labs/FLUX.2-dev: the class's default.
FLUX2_DEV = components.of_diffusers(
    "Flux2Transformer2DModel", num_layers=8, num_single_layers=48, guidance_embeds=True
)
# black-forest-labs/FLUX.2-klein-4B and -9B: neither has a guidance input.
FLUX2_KLEIN_4B = components.of_diffusers(
    "Flux2Transformer2DModel",
    num_layers=5,
    num_single_layers=20,
    num_attention_heads=24,
    joint_attention_dim=7680,
    guidance_embeds=False,
)
FLUX2_KLEIN_9B = components.of_diffusers(
    "Flux2Transformer2DModel",
    num_layers=8,
    num_single_layers=24,
    num_attention_heads=32,
    joint_attention_dim=12288,
    guidance_embeds=False,
)
# Its pipelines compute the shift themselves, from the number of tokens and of steps.
_FLUX2_FLOW = components.of_diffusers(components.FLOW, shift=3.0, use_dynamic_shifting=True)


# fal/FLUX.2-dev-Turbo: the sigmas that its card passes to the pipeline, and its guidance, an input of the model.
_TURBO = FewSteps(
    kind="turbo",
    lora=StoredPart(repo="fal/FLUX.2-dev-Turbo", revision="main", files=("flux.2-turbo-lora.safetensors",)),
    steps=(8,),
    guidance_scale=2.5,
    scheduler=SamplerEntry(class_name=components.FLOW),
    call={"sigmas": [1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031]},
)


def _hub(name: str, download_bytes: int) -> Hub:
    return Hub(repo=f"black-forest-labs/FLUX.2-{name}", tiny_vae=TAEF2_FILES, download_bytes=download_bytes)


def _publish(
    entry: Entry,
    transformer: components.ComponentConfig,
    text_encoder: components.ComponentConfig,
    title: str,
    labels: str,
    step_flop: int,
    **arguments: Any,
) -> family.PublishedModel:
    parts = {"transformer": transformer, "vae": FLUX2_VAE, "text_encoder": text_encoder}
    architecture = components.Architecture.of(entry, parts, _FLUX2_FLOW, {"text_encoder": 512}, **arguments)
    return family.PublishedModel(entry, architecture, title, labels, step_flop)


def _distilled(name: str, summary: str, download_bytes: int, pipeline: str, **own: Any) -> Entry:
    return Entry(
        name=f"flux2-{name.lower()}",
        summary=f"FLUX.2 {summary}",
        origin=_hub(name, download_bytes),
        pipeline=pipeline,
        num_inference_steps=4,
        guidance_scale=1.0,
        ignores_guidance=True,
        max_sequence_length=512,
        **own,
    )


def _klein(
    size: str,
    transformer: components.ComponentConfig,
    text_encoder: components.ComponentConfig,
    step_flop: int,
    download_bytes: int,
    **own: Any,
) -> tuple[family.PublishedModel, family.PublishedModel]:
    """Return the distilled model and its base, which has the same networks, and calls its transformer twice a step."""
    summary = f"[klein] {size}, distilled to 4 steps"
    distilled = _distilled(f"klein-{size}", summary, download_bytes, "Flux2KleinPipeline", **own)
    base = Entry(
        name=f"flux2-klein-base-{size.lower()}",
        summary=f"FLUX.2 [klein] base {size}, not distilled: guidance in a second call",
        origin=_hub(f"klein-base-{size}", download_bytes),
        pipeline="Flux2KleinPipeline",
        num_inference_steps=50,
        guidance_scale=4.0,
        max_sequence_length=512,
        **own,
    )
    networks, title, labels = (
        (transformer, text_encoder),
        f"FLUX.2 [klein] {size}",
        rf".*klein.*{size.lower()}",
    )
    of_base = title.replace("] ", "] base ")
    return (
        _publish(distilled, *networks, title, f"^(?!.*(?:base|kv)){labels}", step_flop, is_distilled=True),
        _publish(base, *networks, of_base, f"^(?=.*base){labels}", 2 * step_flop, is_distilled=False),
    )


# Steps and guidance of the base models are the pipeline's defaults. Their configurations are those of the distilled
# ones, but that their pipeline is not `is_distilled`.
_MODELS = (
    *_klein("4B", FLUX2_KLEIN_4B, _QWEN3_4B, 34_820_178_051_072, 15_960_000_000, licence="Apache-2.0"),
    *_klein(
        "9B",
        FLUX2_KLEIN_9B,
        _QWEN3_8B,
        75_514_721_075_200,
        34_710_000_000,
        licence="FLUX Non-Commercial",
        gated=True,
    ),
    # Trained to read sources that attend to themselves alone. Steps and licence are its card's; its pipeline takes no
    # guidance, and draws without sources, too. Its networks and bytes are taken to be klein 9B's: its files are gated,
    # and were not checked.
    _publish(
        _distilled(
            "klein-9b-kv",
            "[klein] 9B KV, distilled to 4 steps: keeps the keys and values of source images",
            34_710_000_000,
            "Flux2KleinKVPipeline",
            licence="FLUX Non-Commercial",
            gated=True,
        ),
        FLUX2_KLEIN_9B,
        _QWEN3_8B,
        "FLUX.2 [klein] 9B KV",
        r"^(?!.*base).*klein.*9b.*kv",
        75_514_721_075_200,
        is_distilled=True,
    ),
    # Guidance is an input of the transformer. The card's example has 50 steps, and says that 28 are a good compromise.
    _publish(
        Entry(
            name="flux2-dev",
            summary="FLUX.2 [dev], 32 B parameters, guidance distilled into the transformer",
            licence="FLUX Non-Commercial",
            gated=True,
            origin=_hub("dev", 112_640_000_000),
            pipeline="Flux2Pipeline",
            num_inference_steps=50,
            guidance_scale=4.0,
            max_sequence_length=512,
            few_steps=(_TURBO,),
        ),
        FLUX2_DEV,
        MISTRAL_SMALL_24B,
        "FLUX.2 [dev]",
        r"flux[ ._-]?2.*dev",
        282_599_551_401_984,
    ),
)


def _run_without_values(pipe: Any, height: int, width: int) -> None:
    """Tell the size of the latents, which the pipeline reads from their positions."""
    side = 2 * int(pipe.vae_scale_factor)

    def unpack(tokens: Any, _: Any) -> Any:
        return tokens.transpose(1, 2).unflatten(2, (height // side, width // side)).contiguous()

    pipe._unpack_latents_with_ids = unpack


_NAMES: family.Names = {
    **family.in_block(
        "transformer_blocks.#",
        "double_blocks.#",
        ATTENTION_NAMES
        | {
            "img_mlp.0": ("ff.linear_in",),
            "img_mlp.2": ("ff.linear_out",),
            "txt_mlp.0": ("ff_context.linear_in",),
            "txt_mlp.2": ("ff_context.linear_out",),
        },
    ),
    **family.in_block(
        "single_transformer_blocks.#",
        "single_blocks.#",
        {
            "linear1": ("attn.to_qkv_mlp_proj",),
            "linear2": ("attn.to_out",),
            "norm.query_norm": ("attn.norm_q",),
            "norm.key_norm": ("attn.norm_k",),
        },
    ),
    **OUTSIDE_NAMES,
    **{
        f"{old}_in.{place}_layer": (f"time_guidance_embed.{new}_embedder.linear_{number}",)
        for old, new in (("time", "timestep"), ("guidance", "guidance"))
        for number, place in ((1, "in"), (2, "out"))
    },
    **{
        f"{name}.lin": (f"{name}.linear",)
        for name in (
            "single_stream_modulation",
            "double_stream_modulation_img",
            "double_stream_modulation_txt",
        )
    },
}
_SHARED = "single_stream_modulation.lin.weight"
_HAS = (_SHARED, "double_blocks.0.img_attn.qkv.weight", "img_in.weight")


def _signature(what: str, entry: str, width: int, *has: str, note: str = "") -> family.Signature:
    sizes = (("img_in.weight", 0, width),)
    return family.Signature(what, (*_HAS, *has), sizes, entry, "transformer", note=note)


_DISTILLED = "no tensor says whether it is distilled: read as the one that draws in 4 steps"
_FILES = family.SingleFiles(
    (
        _signature("FLUX.2 [dev]", "flux2-dev", 6144, "guidance_in.in_layer.weight"),
        _signature("FLUX.2 [klein] 4B", "flux2-klein-4b", 3072, note=_DISTILLED),
        _signature("FLUX.2 [klein] 9B", "flux2-klein-9b", 4096, note=_DISTILLED),
        family.Signature(
            "FLUX.2 of a size that vivace does not know, or written with other shapes", (_SHARED,)
        ),
        family.Signature(
            "FLUX.2 in diffusers' layout, without its VAE and text encoder",
            ("single_stream_modulation.linear.weight",),
        ),
    ),
    supported=("FLUX.2",),
    contains=("FLUX.1",),
)


FLUX2 = family.Family(
    name="FLUX.2",
    denoiser="Flux2Transformer2DModel",
    # Source images: docs.bfl.ai, "Reference Images per Model".
    pipelines=(
        family.Pipeline(
            "Flux2Pipeline",
            {"edit": "Flux2Pipeline"},
            images_are_optional=True,
            most_images=6,
            last_text_state=30,
            appends_sources=True,
            run_without_values=_run_without_values,
        ),
        family.Pipeline(
            "Flux2KleinPipeline",
            {"edit": "Flux2KleinPipeline"},
            images_are_optional=True,
            most_images=4,
            last_text_state=27,
            appends_sources=True,
        ),
        family.Pipeline(
            "Flux2KleinKVPipeline",
            {"edit": "Flux2KleinKVPipeline"},
            images_are_optional=True,
            most_images=4,
            last_text_state=27,
            keeps_sources=True,
            run_without_values=_run_without_values,
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(_NAMES),
    lora_layers=(
        "stream_modulation",
        "to_qkv_mlp_proj",
        "double_blocks",
        "single_blocks",
        "single_transformer_blocks",
    ),
    models=_MODELS,
    random_weights={
        "Flux2Transformer2DModel": family.RandomWeights(_gains),
        "AutoencoderKLFlux2": family.RandomWeights(vae_gains),
    },
    not_by_diffusers="its single blocks return text and image as one tensor, its double blocks as two",
    blocks=family.Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=family.output_of("x_embedder"),
        leaving=family.input_of("norm_out"),
        modulated=_modulated,
        grid=family.grid_of_ids,
        joined=("single_transformer_blocks",),
    ),
    sources=family.SourceTokens(family.without_last_ids),
    fused="flux2",
)
