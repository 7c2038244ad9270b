"""FLUX.1: double blocks, which keep text and image apart, then single ones.

Guidance is an input of the transformer; true guidance, with a negative prompt, is a second call.
Kontext, which edits, takes a image's latents as further tokens behind the image's own.
Source: diffusers, FluxTransformer2DModel, FluxPipeline, FluxKontextPipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import (
    TAEF1_FILES,
    Embedded,
    Entry,
    FewSteps,
    Hub,
    SamplerEntry,
    StoredPart,
    embedded_entry,
)
from vivace.architectures.gains import double_and_single


def _gains(transformer: Any) -> family.Rules:
    # Summed are time, guidance and the pooled text.
    return double_and_single(transformer, 3 if transformer.config.guidance_embeds else 2)


def _of_controlnet(transformer: Any) -> dict[str, Any]:
    config = transformer.config
    return {
        "num_layers": min(4, config.num_layers),
        "num_single_layers": min(10, config.num_single_layers),
        "attention_head_dim": config.attention_head_dim,
        "num_attention_heads": config.num_attention_heads,
    }


_DEV = components.of_diffusers("FluxTransformer2DModel", guidance_embeds=True)
_SCHNELL = components.of_diffusers("FluxTransformer2DModel", guidance_embeds=False)
_DEV_SAMPLER = components.of_diffusers(components.FLOW, shift=3.0, use_dynamic_shifting=True)
_SCHNELL_SAMPLER = components.of_diffusers(components.FLOW, shift=1.0, use_dynamic_shifting=False)


def _few_steps() -> tuple[FewSteps, ...]:
    """Both keep FLUX.1 [dev]'s scheduler and its guidance, which is an input of the model."""
    hyper = tuple(
        FewSteps(
            kind="hyper",
            lora=StoredPart(
                repo="ByteDance/Hyper-SD",
                revision="bc08d970a87c74c71209491d64e3525845698863",
                files=(f"Hyper-FLUX.1-dev-{steps}steps-lora.safetensors",),
            ),
            steps=(steps,),
            scale=0.125,
            guidance_scale=3.5,
            scheduler=SamplerEntry(class_name=components.FLOW),
        )
        for steps in (8, 16)
    )
    turbo = FewSteps(
        kind="turbo",
        lora=StoredPart(
            repo="alimama-creative/FLUX.1-Turbo-Alpha",
            revision="main",
            files=("diffusion_pytorch_model.safetensors",),
        ),
        steps=(8,),
        guidance_scale=3.5,
        scheduler=SamplerEntry(class_name=components.FLOW),
    )
    return (*hyper, turbo)


def _publish(
    entry: Entry,
    transformer: components.ComponentConfig,
    sampler: components.ComponentConfig,
    title: str,
    labels: str,
    step_flop: int,
) -> family.PublishedModel:
    text_length = entry.max_sequence_length
    assert text_length is not None
    architecture = components.Architecture.of(
        entry,
        {
            "transformer": transformer,
            "vae": components.FLUX_VAE,
            "text_encoder": components.CLIP_L,
            "text_encoder_2": components.T5_XXL,
        },
        sampler,
        {"text_encoder": 77, "text_encoder_2": text_length},
        components.TAEF1,
    )
    return family.PublishedModel(entry, architecture, title, labels, step_flop)


def _hub(repo: str, revision: str) -> Hub:
    return Hub(repo=repo, revision=revision, tiny_vae=TAEF1_FILES, download_bytes=33_740_000_000)


_MODELS = (
    family.PublishedModel(
        embedded_entry(
            name="tiny-flux",
            summary="FLUX.1-dev's architecture, small: the same shapes, guidance distilled",
            origin=Embedded(folder="tiny-flux", tiny_vae="tiny-flux-tiny-vae"),
            pipeline="FluxPipeline",
            size_multiple=16,
            num_inference_steps=28,
            guidance_scale=3.5,
            max_sequence_length=32,
        )
    ),
    family.PublishedModel(
        embedded_entry(
            name="tiny-flux-schnell",
            summary="FLUX.1-schnell's architecture, small: tiny-flux distilled to 4 steps",
            origin=Embedded(folder="tiny-flux-schnell", base="tiny-flux", tiny_vae="tiny-flux-tiny-vae"),
            pipeline="FluxPipeline",
            size_multiple=16,
            num_inference_steps=4,
            guidance_scale=0.0,
            max_sequence_length=32,
        )
    ),
    # The card uses 50 steps; the pipeline's default is 28.
    _publish(
        Entry(
            name="flux-dev",
            summary="FLUX.1 [dev], 12 B parameters, guidance distilled into the transformer",
            licence="FLUX.1 [dev] Non-Commercial",
            gated=True,
            origin=_hub("black-forest-labs/FLUX.1-dev", "3de623fc3c33e44ffbe2bad470d0f45bccf2eb21"),
            pipeline="FluxPipeline",
            num_inference_steps=28,
            guidance_scale=3.5,
            max_sequence_length=512,
            few_steps=_few_steps(),
        ),
        _DEV,
        _DEV_SAMPLER,
        "FLUX.1 [dev]",
        r"flux(?![ ._-]?2)(?!.*kontext).*dev",
        74_384_653_418_496,
    ),
    _publish(
        Entry(
            name="flux-schnell",
            summary="FLUX.1 [schnell], distilled to 1 to 4 steps",
            licence="Apache-2.0",
            gated=True,
            origin=_hub("black-forest-labs/FLUX.1-schnell", "741f7c3ce8b383c54771c7003378a50191e9efe9"),
            pipeline="FluxPipeline",
            num_inference_steps=4,
            guidance_scale=0.0,
            max_sequence_length=256,
        ),
        _SCHNELL,
        _SCHNELL_SAMPLER,
        "FLUX.1 [schnell]",
        r"flux.*schnell",
        69_466_626_981_888,
    ),
    # Its transformer has FLUX.1 [dev]'s shape, and takes the image's latents as further tokens. Guidance from the
    # example in diffusers, steps from the pipeline's default. Its commit is not known, and its card was not read: size,
    # access and scheduler are those of FLUX.1 [dev], which copies of its repository quote.
    _publish(
        Entry(
            name="flux-kontext",
            summary="FLUX.1 Kontext [dev], 12 B parameters: edits an image as the prompt says",
            licence="FLUX.1 [dev] Non-Commercial",
            gated=True,
            origin=_hub("black-forest-labs/FLUX.1-Kontext-dev", "main"),
            pipeline="FluxKontextPipeline",
            num_inference_steps=28,
            guidance_scale=2.5,
            max_sequence_length=512,
            prompt_set="edit",
        ),
        _DEV,
        _DEV_SAMPLER,
        "FLUX.1 Kontext [dev]",
        r"kontext",
        165_458_361_188_352,
    ),
)

_DEV_CONFIG = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "guidance_embeds": True,
}


def _ratios() -> tuple[float, ...]:
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    return tuple(float(ratio) for ratio in FLUX_MAG_RATIOS)


_POLYNOMIAL = (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01)


# The names in github.com/black-forest-labs/flux, and those of XLabs' LoRAs (github.com/XLabs-AI/x-flux).
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
ATTENTION_NAMES: family.Names = {
    "img_attn.qkv": QKV,
    "txt_attn.qkv": ADDED,
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
}

OUTSIDE_NAMES: family.Names = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
NAMES: family.Names = {
    **family.in_block(
        "transformer_blocks.#",
        "double_blocks.#",
        ATTENTION_NAMES
        | {
            "img_mlp.0": ("ff.net.0.proj",),
            "img_mlp.2": ("ff.net.2",),
            "txt_mlp.0": ("ff_context.net.0.proj",),
            "txt_mlp.2": ("ff_context.net.2",),
            "img_mod.lin": ("norm1.linear",),
            "txt_mod.lin": ("norm1_context.linear",),
            "processor.qkv_lora1": QKV,  # XLabs'
            "processor.qkv_lora2": ADDED,
            "processor.proj_lora1": ("attn.to_out.0",),
            "processor.proj_lora2": ("attn.to_add_out",),
        },
    ),
    **family.in_block(
        "single_transformer_blocks.#",
        "single_blocks.#",
        {
            "linear1": (*QKV, "proj_mlp"),
            "linear2": ("proj_out",),
            "modulation.lin": ("norm.linear",),
            "norm.query_norm": ("attn.norm_q",),
            "norm.key_norm": ("attn.norm_k",),
            "processor.qkv_lora": QKV,
            "processor.proj_lora": ("proj_out",),
        },
    ),
    **OUTSIDE_NAMES,
    **{
        f"{old}_in.{place}_layer": (f"time_text_embed.{new}_embedder.linear_{number}",)
        for old, new in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
        for number, place in ((1, "in"), (2, "out"))
    },
}
_KEY_NORM = "double_blocks.0.img_attn.norm.key_norm.scale"
_GUIDANCE = "guidance_in.in_layer.weight"
_SIXTY_FOUR = (("img_in.weight", 1, 64),)
_PARTS = (
    family.FilePart("vae", "vae."),
    family.FilePart("text_encoder", "text_encoders.clip_l.transformer."),
    family.FilePart("text_encoder_2", "text_encoders.t5xxl.transformer."),
)
_BUNDLE = ("text_encoders.clip_l.*", "text_encoders.t5xxl.*", "vae.*")
_KONTEXT_BY_NAME = {
    "kontext": "its name tells of FLUX.1 Kontext, whose tensors are those of FLUX.1 [dev]: read as that, without a "
    "source image; to edit images give Kontext as a folder in diffusers' format"
}
_NO_GUIDANCE = "no tensor takes a guidance scale: read as FLUX.1 [schnell], which draws in 4 steps"


def _signatures(
    *has: str, component: str | None = None, parts: tuple[family.FilePart, ...] = ()
) -> tuple[family.Signature, ...]:
    """Return those of [dev] and [schnell], by one of the blocks and the width of the input."""
    return (
        family.Signature(
            "FLUX.1 [dev]",
            (_KEY_NORM, _GUIDANCE, *has),
            _SIXTY_FOUR,
            "flux-dev",
            component,
            parts,
            notes_by_name=_KONTEXT_BY_NAME,
        ),
        family.Signature(
            "FLUX.1 [schnell]",
            (_KEY_NORM, *has),
            _SIXTY_FOUR,
            "flux-schnell",
            component,
            parts,
            note=_NO_GUIDANCE,
        ),
    )


_FILES = family.SingleFiles(
    (
        *_signatures(*_BUNDLE, parts=_PARTS),
        *_signatures(component="transformer"),
        family.Signature(
            "a FLUX.1 variant with inputs other than text: FLUX.1 Fill, whose input has an image and a mask",
            (_KEY_NORM,),
            (("img_in.weight", 1, 384),),
        ),
        family.Signature(
            "a FLUX.1 variant with inputs other than text: FLUX.1 Depth or Canny, whose input has a control image",
            (_KEY_NORM,),
            (("img_in.weight", 1, 128),),
        ),
        family.Signature(
            "a model with FLUX.1's blocks whose input (img_in.weight) is not FLUX.1's 64 channels, nor those of a "
            "variant that vivace knows: it is another model, or was written with other shapes",
            (_KEY_NORM, "img_in.weight"),
        ),
    ),
    supported=("FLUX.1",),
    modules=(
        "double_blocks.",
        "single_blocks.",
        "img_in.",
        "txt_in.",
        "time_in.",
        "vector_in.",
        "guidance_in.",
        "final_layer.",
    ),
    plain_prefixes=("", family.UNET_PREFIX),
    plain_sizes=(("img_in.weight", 0, 3072),),
    is_plain_alone=True,
)


FLUX = family.Family(
    name="FLUX.1",
    denoiser="FluxTransformer2DModel",
    pipelines=(
        family.Pipeline(
            "FluxPipeline",
            tasks={
                "image": "FluxImg2ImgPipeline",
                "inpaint": "FluxInpaintPipeline",
                "control": "FluxControlNetPipeline",
            },
            # FLUX.1 [schnell]
            own_defaults=(
                family.OwnDefaults("transformer/config.json", "guidance_embeds", False, 4, 0.0, 256),
            ),
            max_text_length=512,
        ),
        family.Pipeline(
            "FluxKontextPipeline",
            tasks={"edit": "FluxKontextPipeline"},
            max_text_length=512,
            appends_sources=True,
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(NAMES),
    lora_layers=(
        "img_mod_lin",
        "modulation_lin",
        "double_blocks",
        "single_blocks",
        "single_transformer_blocks",
    ),
    distilled=(family.DistilledFile("flux-dev", "schnell", {"num_inference_steps": 4}),),
    models=_MODELS,
    random_weights={"FluxTransformer2DModel": family.RandomWeights(_gains)},
    blocks=family.Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=family.output_of("x_embedder"),
        leaving=family.input_of("norm_out"),
        modulated=family.modulated_by_time,
        grid=family.grid_of_ids,
        added_between=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    sources=family.SourceTokens(family.without_last_ids),
    cache_fits={
        "magcache": family.PublishedFit(
            _ratios, "FLUX.1 [dev]", "published for FLUX.1 (diffusers)", _DEV_CONFIG
        ),
        "teacache": family.PublishedFit(
            lambda: _POLYNOMIAL, "FLUX.1 [dev]", "published for FLUX.1 [dev] (TeaCache4FLUX)", _DEV_CONFIG
        ),
    },
    controlnets=family.ControlNets("FluxControlNetModel", "from_transformer", _of_controlnet),
    fused="flux",
    divides_tokens=True,
)
