"""The shapes of the networks, and their folders.

They are small enough that an image takes less than a CPU-second on a laptop. Every Linear width is a multiple of 32, so
that every quantisation scheme applies.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    EulerAncestralDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)  # fmt: skip
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tinyworld import tokenizer
from tinyworld.words import SIDE

LATENT_CHANNELS = 4
LATENT_SIDE = SIDE // 8
TEXT_WIDTH = 128

# Stable Diffusion's noise schedule. The default sampler of the folder is its Euler ancestral.
SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "steps_offset": 1,  # StableDiffusionPipeline warns about any other value
}

SD_FOLDER = "tiny-sd"
TINY_VAE_FOLDER = "tiny-sd-tiny-vae"
TINY_VAE_FOLDERS = {4: TINY_VAE_FOLDER, 16: "tiny-flux-tiny-vae"}
"""By latent channels."""


def vae_name(channels: int) -> str:
    """Working name of the VAE of so many latent channels: of its folder, checkpoint and log."""
    return "vae" if channels == LATENT_CHANNELS else f"vae-{channels}"


def build_vae(channels: int = LATENT_CHANNELS) -> AutoencoderKL:
    """Build an f8 VAE: a 128 px image has 16x16 cells of 4 (Stable Diffusion) or 16 (FLUX) channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=16,
        sample_size=SIDE,
        scaling_factor=1.0,
        shift_factor=0.0,  # FluxPipeline adds it, and cannot add None
        force_upcast=False,
    )


def build_tiny_vae(channels: int = LATENT_CHANNELS) -> AutoencoderTiny:
    """Encodes to and decodes from the latents that the denoiser sees, so its scaling factor is 1, as TAESD's is."""
    return AutoencoderTiny(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(3, 3, 3, 1),
        latent_channels=channels,
        scaling_factor=1.0,
    )


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 96, 128),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # the number of heads, despite the name: 16, 24 and 32 channels each
        norm_num_groups=16,
    )


def build_text_encoder(layers: int = 4) -> CLIPTextModel:
    words = tokenizer.build()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.MAX_LENGTH,
            projection_dim=TEXT_WIDTH,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
    )


@torch.no_grad()
def whiten(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Fold the latents' mean and std (channels,) into the adjacent 1x1 convolutions, so that channels are like N(0, 1).

    A pipeline can only divide by a single `scaling_factor`; per-channel statistics must be part of the weights.
    """
    before, after = vae.quant_conv, vae.post_quant_conv
    moments = before.weight.shape[0] // 2
    scale = torch.cat([1 / std, torch.ones_like(std)])
    shift = torch.cat([-mean / std, -2 * std.log()])  # the second half is a log-variance
    before.weight.mul_(scale[:, None, None, None])
    before.bias.mul_(scale).add_(shift)
    assert moments == len(std)
    after.bias.add_(torch.einsum("oi,i->o", after.weight[:, :, 0, 0], mean))
    after.weight.mul_(std[None, :, None, None])


def save_sd(
    folder: Path, vae: AutoencoderKL, unet: UNet2DConditionModel, text_encoder: CLIPTextModel
) -> None:
    """Write the fp16 pipeline folder atomically."""
    pipe = StableDiffusionPipeline(
        vae=half(vae, build_vae()),
        unet=half(unet, build_unet()),
        text_encoder=half(text_encoder, build_text_encoder()),
        tokenizer=tokenizer.build(),
        scheduler=EulerAncestralDiscreteScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with atomic_folder(folder) as unsaved:
        pipe.save_pretrained(unsaved, safe_serialization=True)
        load_in_fp32(unsaved / "text_encoder")


def save_model(model: nn.Module, folder: Path) -> None:
    """Write one model as it is, for the next stage of training."""
    with atomic_folder(folder) as unsaved:
        model.save_pretrained(unsaved, safe_serialization=True)


def save_tiny_vae(folder: Path, vae: AutoencoderTiny) -> None:
    with atomic_folder(folder) as unsaved:
        half(vae, build_tiny_vae(vae.config.latent_channels)).save_pretrained(
            unsaved, safe_serialization=True
        )
        # diffusers writes this key, and complains when it reads it
        edit(unsaved / "config.json", block_out_channels=None)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end."""
    unsaved = folder.with_name(folder.name + ".part")
    shutil.rmtree(unsaved, ignore_errors=True)
    yield unsaved
    for file in unsaved.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them readable by the owner only
    shutil.rmtree(folder, ignore_errors=True)
    unsaved.rename(folder)


def load_in_fp32(text_encoder: Path) -> None:
    """Set fp32 as the default dtype in a text encoder's config.

    Otherwise transformers would load it in the stored fp16 while diffusers loads the other components in fp32, and a
    pipeline from a plain from_pretrained(folder) would fail with "Half and Float".
    """
    edit(text_encoder / "config.json", dtype="float32")


def edit(config: Path, **changes: str | None) -> None:
    settings = {**json.loads(config.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in settings.items() if value is not None or key not in changes}
    config.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def half(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """An fp16 copy on the CPU; the model in training stays as it is."""
    fresh.load_state_dict(model.state_dict())
    return fresh.half().eval()


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
