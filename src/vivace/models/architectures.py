"""The published architecture of every catalogue model, as data.

Each component and scheduler is its class with the arguments in which its published config.json differs from the class's
defaults. Sources: the config.json files of the repositories named in the comments. This is enough to count parameters
and FLOPs without memory, and to build the pipeline with random weights (`vivace.models.synthetic`).
"""

from __future__ import annotations

from vivace.architectures.components import Architecture, Component, Library, of_diffusers, replaced
from vivace.models.flow_architectures import (
    CLIP_L,
    FLOW_ARCHITECTURES,
    FLUX_VAE,
    KL,
    OPEN_CLIP_BIGG,
    T5_XXL,
    TAEF1,
)

__all__ = [
    "ARCHITECTURES",
    "CLIP_L",
    "FLUX_VAE",
    "OPEN_CLIP_BIGG",
    "T5_XXL",
    "TAEF1",
    "Architecture",
    "Component",
    "Library",
]

# --- VAEs -----------------------------------------------------------------------------------------------------------

SD15_VAE = of_diffusers("AutoencoderKL", **KL, sample_size=512, scaling_factor=0.18215)
# `force_upcast`: its activations overflow fp16, so the pipeline decodes in fp32 where the weights are fp16.
SDXL_VAE = of_diffusers("AutoencoderKL", **KL, sample_size=1024, scaling_factor=0.13025, force_upcast=True)
PLAYGROUND_VAE = replaced(
    SDXL_VAE,
    scaling_factor=0.5,
    latents_mean=[-1.6574, 1.886, -1.383, 2.5155],
    latents_std=[8.4927, 5.9022, 6.5498, 5.2299],
)
# madebyollin/taesd and taesdxl differ in their weights alone.
TAESD = of_diffusers("AutoencoderTiny")
TAESDXL = TAESD

# --- denoisers ------------------------------------------------------------------------------------------------------

SD15_UNET = of_diffusers(
    "UNet2DConditionModel", sample_size=64, cross_attention_dim=768, attention_head_dim=8
)
SDXL_UNET = of_diffusers(
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
LCM_SDXL_UNET = replaced(SDXL_UNET, time_cond_proj_dim=256)

FLUX_DEV = of_diffusers("FluxTransformer2DModel", guidance_embeds=True)
FLUX_SCHNELL = of_diffusers("FluxTransformer2DModel", guidance_embeds=False)

# --- schedulers -----------------------------------------------------------------------------------------------------

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}

_PNDM = of_diffusers("PNDMScheduler", **_BETAS, skip_prk_steps=True, set_alpha_to_one=False)
_EULER = of_diffusers("EulerDiscreteScheduler", **_BETAS, timestep_spacing="leading")
_EULER_TRAILING = replaced(_EULER, timestep_spacing="trailing")
_EULER_ANCESTRAL = of_diffusers("EulerAncestralDiscreteScheduler", **_BETAS, timestep_spacing="leading")
_EULER_ANCESTRAL_TRAILING = replaced(_EULER_ANCESTRAL, timestep_spacing="trailing")
# SDXL's scheduler config with another class, as the model cards of ByteDance/Hyper-SD and latent-consistency say.
_DDIM_TRAILING = of_diffusers(
    "DDIMScheduler", **_BETAS, clip_sample=False, set_alpha_to_one=False, timestep_spacing="trailing"
)
_LCM = of_diffusers("LCMScheduler", **_BETAS, set_alpha_to_one=False, timestep_spacing="leading")
_EDM = of_diffusers(
    "EDMDPMSolverMultistepScheduler", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0
)
_FLOW_DEV = of_diffusers("FlowMatchEulerDiscreteScheduler", shift=3.0, use_dynamic_shifting=True)
_FLOW_SCHNELL = of_diffusers("FlowMatchEulerDiscreteScheduler", shift=1.0, use_dynamic_shifting=False)

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


def _flux(
    name: str,
    scheduler: Component,
    transformer: Component,
    text_length: int,
    pipeline: str = "FluxPipeline",
) -> Architecture:
    return Architecture(
        name=name,
        pipeline=pipeline,
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
        _sdxl("sdxl-turbo", _EULER_ANCESTRAL_TRAILING, unet=replaced(SDXL_UNET, sample_size=64), side=512),
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
        # black-forest-labs/FLUX.1-Kontext-dev: FLUX.1 [dev]'s networks and scheduler. The image's latents are tokens
        # beside the image's own. Its repository could not be read; copies of it quote this scheduler and the pipeline.
        _flux("flux-kontext", _FLOW_DEV, FLUX_DEV, text_length=512, pipeline="FluxKontextPipeline"),
        *FLOW_ARCHITECTURES,
    )
}
