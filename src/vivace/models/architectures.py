"""The published architecture of every catalogue model, as data.

Each component and scheduler is its class with the arguments in which its published config.json differs from the class's
defaults. Sources: the config.json files of the repositories named in the comments. This is enough to count parameters
and FLOPs without memory, and to build the pipeline with random weights (`vivace.models.synthetic`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.spec.base import Spec

Library = Literal["diffusers", "transformers"]


class Component(Spec):
    """A class of diffusers or transformers and its constructor arguments (lists, since JSON has no tuples)."""

    library: Library
    class_name: str
    config: dict[str, Any]


class Architecture(Spec):
    """A whole pipeline without its weights.

    `components` have the names of the pipeline's constructor arguments. `text_lengths` is the number of tokens per
    prompt for each text encoder. `arguments` are further arguments of the pipeline's constructor, besides components,
    tokenizers and scheduler. `height` and `width` are the native size in pixels.
    """

    name: str
    pipeline: str
    components: dict[str, Component]
    text_lengths: dict[str, int]
    scheduler: Component
    tiny_vae: Component
    height: int
    width: int
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def denoiser(self) -> Literal["unet", "transformer"]:
        """Name of the component that is called at every step."""
        return "unet" if "unet" in self.components else "transformer"

    def changed(self, **configs: dict[str, Any]) -> Architecture:
        """Return a copy with other arguments for some components: `changed(unet={"layers_per_block": 1})`."""
        unknown = set(configs) - set(self.components)
        if unknown:
            raise ValueError(
                f"{self.name} has no {', '.join(sorted(unknown))}; it has {', '.join(self.components)}"
            )
        components = self.components | {
            name: _with(self.components[name], **config) for name, config in configs.items()
        }
        return self.model_copy(update={"components": components})


def _with(component: Component, **config: Any) -> Component:
    return component.model_copy(update={"config": component.config | config})


def _diffusers(class_name: str, **config: Any) -> Component:
    return Component(library="diffusers", class_name=class_name, config=config)


def _transformers(class_name: str, **config: Any) -> Component:
    return Component(library="transformers", class_name=class_name, config=config)


# --- text encoders --------------------------------------------------------------------------------------------------

# The published eos_token_id of 2 is a mistake that must be kept: with it, the pooled vector is taken at the highest id,
# which is the true end token, 49407.
_CLIP = {
    "vocab_size": 49408,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 77,
}

# openai/clip-vit-large-patch14, as text_encoder of SD 1.5, SDXL and FLUX.1.
CLIP_L = _transformers(
    "CLIPTextModel",
    **_CLIP,
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
    num_hidden_layers=12,
    projection_dim=768,
    hidden_act="quick_gelu",
)
# laion/CLIP-ViT-bigG-14-laion2B-39B-b160k, as text_encoder_2 of SDXL.
OPEN_CLIP_BIGG = _transformers(
    "CLIPTextModelWithProjection",
    **_CLIP,
    hidden_size=1280,
    intermediate_size=5120,
    num_attention_heads=20,
    num_hidden_layers=32,
    projection_dim=1280,
    hidden_act="gelu",
)
# google/t5-v1_1-xxl, its encoder, as text_encoder_2 of FLUX.1.
T5_XXL = _transformers(
    "T5EncoderModel",
    vocab_size=32128,
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_decoder_layers=24,
    num_heads=64,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    decoder_start_token_id=0,
)

# --- VAEs -----------------------------------------------------------------------------------------------------------

_KL: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}

SD15_VAE = _diffusers("AutoencoderKL", **_KL, sample_size=512, scaling_factor=0.18215)
# `force_upcast`: its activations overflow fp16, so the pipeline decodes in fp32 where the weights are fp16.
SDXL_VAE = _diffusers("AutoencoderKL", **_KL, sample_size=1024, scaling_factor=0.13025, force_upcast=True)
# madebyollin/sdxl-vae-fp16-fix: the same network, its weights rescaled so that fp16 is enough.
SDXL_VAE_FP16_FIX = _with(SDXL_VAE, force_upcast=False)
PLAYGROUND_VAE = _with(
    SDXL_VAE,
    scaling_factor=0.5,
    latents_mean=[-1.6574, 1.886, -1.383, 2.5155],
    latents_std=[8.4927, 5.9022, 6.5498, 5.2299],
)
FLUX_VAE = _diffusers(
    "AutoencoderKL",
    **_KL,
    sample_size=1024,
    latent_channels=16,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)

# madebyollin/taesd, taesdxl, taef1: the first two differ in their weights alone.
TAESD = _diffusers("AutoencoderTiny")
TAESDXL = TAESD
TAEF1 = _diffusers("AutoencoderTiny", latent_channels=16)

# --- denoisers ------------------------------------------------------------------------------------------------------

SD15_UNET = _diffusers("UNet2DConditionModel", sample_size=64, cross_attention_dim=768, attention_head_dim=8)
SDXL_UNET = _diffusers(
    "UNet2DConditionModel",
    sample_size=128,
    down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    block_out_channels=[320, 640, 1280],
    transformer_layers_per_block=[1, 2, 10],
    attention_head_dim=[5, 10, 20],  # the number of heads, despite the name
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
# The guidance scale is an embedded input, so there is no second, unconditional call (latent-consistency/lcm-sdxl).
LCM_SDXL_UNET = _with(SDXL_UNET, time_cond_proj_dim=256)

FLUX_DEV = _diffusers("FluxTransformer2DModel", guidance_embeds=True)
FLUX_SCHNELL = _diffusers("FluxTransformer2DModel", guidance_embeds=False)

# --- schedulers -----------------------------------------------------------------------------------------------------

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}

_PNDM = _diffusers("PNDMScheduler", **_BETAS, skip_prk_steps=True, set_alpha_to_one=False)
_EULER = _diffusers("EulerDiscreteScheduler", **_BETAS, timestep_spacing="leading")
_EULER_TRAILING = _with(_EULER, timestep_spacing="trailing")
_EULER_ANCESTRAL = _diffusers("EulerAncestralDiscreteScheduler", **_BETAS, timestep_spacing="leading")
_EULER_ANCESTRAL_TRAILING = _with(_EULER_ANCESTRAL, timestep_spacing="trailing")
# SDXL's scheduler config with another class, as the model cards of ByteDance/Hyper-SD and latent-consistency say.
_DDIM_TRAILING = _diffusers(
    "DDIMScheduler", **_BETAS, clip_sample=False, set_alpha_to_one=False, timestep_spacing="trailing"
)
_LCM = _diffusers("LCMScheduler", **_BETAS, set_alpha_to_one=False, timestep_spacing="leading")
_EDM = _diffusers("EDMDPMSolverMultistepScheduler", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0)
_FLOW_DEV = _diffusers("FlowMatchEulerDiscreteScheduler", shift=3.0, use_dynamic_shifting=True)
_FLOW_SCHNELL = _diffusers("FlowMatchEulerDiscreteScheduler", shift=1.0, use_dynamic_shifting=False)

# --- models ---------------------------------------------------------------------------------------------------------


def _sdxl(
    name: str,
    scheduler: Component,
    unet: Component = SDXL_UNET,
    vae: Component = SDXL_VAE,
    side: int = 1024,
) -> Architecture:
    return Architecture(
        name=name,
        pipeline="StableDiffusionXLPipeline",
        components={"unet": unet, "vae": vae, "text_encoder": CLIP_L, "text_encoder_2": OPEN_CLIP_BIGG},
        text_lengths={"text_encoder": 77, "text_encoder_2": 77},
        scheduler=scheduler,
        tiny_vae=TAESDXL,
        height=side,
        width=side,
        # Otherwise the pipeline adds a watermark if the watermarking library happens to be installed.
        arguments={"force_zeros_for_empty_prompt": True, "add_watermarker": False},
    )


def _flux(name: str, scheduler: Component, transformer: Component, text_length: int) -> Architecture:
    return Architecture(
        name=name,
        pipeline="FluxPipeline",
        components={
            "transformer": transformer,
            "vae": FLUX_VAE,
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
        },
        text_lengths={"text_encoder": 77, "text_encoder_2": text_length},
        scheduler=scheduler,
        tiny_vae=TAEF1,
        height=1024,
        width=1024,
    )


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        # stable-diffusion-v1-5/stable-diffusion-v1-5, without its safety checker.
        Architecture(
            name="sd15",
            pipeline="StableDiffusionPipeline",
            components={"unet": SD15_UNET, "vae": SD15_VAE, "text_encoder": CLIP_L},
            text_lengths={"text_encoder": 77},
            scheduler=_PNDM,
            tiny_vae=TAESD,
            height=512,
            width=512,
            arguments={"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
        ),
        # stabilityai/stable-diffusion-xl-base-1.0
        _sdxl("sdxl", _EULER),
        # stabilityai/sdxl-turbo
        _sdxl("sdxl-turbo", _EULER_ANCESTRAL_TRAILING, unet=_with(SDXL_UNET, sample_size=64), side=512),
        # ByteDance/SDXL-Lightning: SDXL with another UNet's weights.
        _sdxl("sdxl-lightning-2step", _EULER_TRAILING),
        _sdxl("sdxl-lightning-4step", _EULER_TRAILING),
        # ByteDance/Hyper-SD: SDXL with a LoRA, merged into the weights.
        _sdxl("hyper-sdxl-4step", _DDIM_TRAILING),
        # latent-consistency/lcm-sdxl
        _sdxl("lcm-sdxl", _LCM, unet=LCM_SDXL_UNET),
        # Pony Diffusion V6 XL; its author asks for ancestral Euler.
        _sdxl("pony", _EULER_ANCESTRAL),
        # playgroundai/playground-v2.5-1024px-aesthetic
        _sdxl("playground", _EDM, vae=PLAYGROUND_VAE),
        # black-forest-labs/FLUX.1-dev and FLUX.1-schnell
        _flux("flux-dev", _FLOW_DEV, FLUX_DEV, text_length=512),
        _flux("flux-schnell", _FLOW_SCHNELL, FLUX_SCHNELL, text_length=256),
    )
}
