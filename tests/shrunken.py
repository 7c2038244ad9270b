"""Small pipelines of the catalogue's families, saved like their repositories: real classes, random weights."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    EDMDPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from vivace.models.find import WEIGHTS

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(WEIGHTS / "tiny-sd" / "tokenizer")


def vae(**config: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        sample_size=64,
        **config,
    )


def text_encoder(kind: Any = CLIPTextModel, width: int = 32) -> Any:
    words = tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=words.model_max_length,
        projection_dim=width,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    return kind(config)


THREE_LEVELS: dict[str, Any] = {
    "block_out_channels": (16, 32, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4, 4),
    "transformer_layers_per_block": (1, 1, 2),
}
"""Of a UNet of SDXL's whose blocks have the names that single files give them."""


def sdxl_unet(**config: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": (2, 4),
            "cross_attention_dim": 32 + 48,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 48,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
        }
        | config
    )


def sdxl(**parts: Any) -> StableDiffusionXLPipeline:
    torch.manual_seed(0)
    components: dict[str, Any] = {
        "vae": vae(scaling_factor=0.13025, force_upcast=True),
        "text_encoder": text_encoder(),
        "text_encoder_2": text_encoder(CLIPTextModelWithProjection, width=48),
        "tokenizer": tokenizer(),
        "tokenizer_2": tokenizer(),
        "unet": sdxl_unet(),
        "scheduler": EulerDiscreteScheduler(**_BETAS, timestep_spacing="leading"),
    }
    return StableDiffusionXLPipeline(**components | parts)


def playground() -> StableDiffusionXLPipeline:
    statistics = {
        "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
        "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    }
    scheduler = EDMDPMSolverMultistepScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5)
    return sdxl(vae=vae(scaling_factor=0.5, force_upcast=True, **statistics), scheduler=scheduler)


def sd15() -> StableDiffusionPipeline:
    """Four levels of two layers, as SD 1.5 has: single files name the blocks of those."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=2,
    )
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=text_encoder(),
        tokenizer=tokenizer(),
        unet=unet,
        scheduler=PNDMScheduler(**_BETAS, skip_prk_steps=True, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save(pipe: Any, folder: Path, variants: tuple[str | None, ...] = (None,)) -> Path:
    for variant in variants:
        dtype = torch.float16 if variant == "fp16" else torch.float32
        pipe.to(dtype=dtype).save_pretrained(folder, variant=variant)
    return folder


def save_tiny_vae(folder: Path, channels: int = 4) -> Path:
    torch.manual_seed(0)
    tiny = AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
    )
    # The number of channels that its own save_pretrained writes is one that it then complains about.
    tiny.register_to_config(block_out_channels=(8, 8, 8, 8))
    tiny.save_pretrained(folder)
    return folder
