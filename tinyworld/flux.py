"""The FLUX family: network shapes, calls of the transformer as in FluxPipeline, and the folders.

Training and sampling must call the transformer in the same way, so all calls go through `velocity`: latents packed in
2x2 patches (128 px, f8: 8x8 = 64 tokens of 64 channels), sigma in 0..1 as `timestep`, the guidance scale as it is (the
transformer multiplies both by 1000), and position ids that count patches, zero for words.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from tinyworld import networks, tokenizer
from tinyworld.networks import LATENT_SIDE, TEXT_WIDTH

FOLDER, SCHNELL_FOLDER, TEACHER_FOLDER = "tiny-flux", "tiny-flux-schnell", "tiny-flux-teacher"
CHANNELS = 16
PATCHES = LATENT_SIDE // 2
TOKENS, TOKEN_WIDTH = PATCHES**2, 4 * CHANNELS
STEPS, GUIDANCE, SCHNELL_STEPS = 28, 3.5, 4
MAX_GUIDANCE = 6.0
"""The student learns guidance scales from 0 (the prompt has no effect) to this."""
CALL = {"height": networks.SIDE, "width": networks.SIDE, "max_sequence_length": tokenizer.MAX_LENGTH}
"""Arguments of a FluxPipeline call besides the prompt: its defaults are 1024 px and prompts padded to 512 tokens."""


def build_transformer(guidance: bool = True) -> FluxTransformer2DModel:
    """Build the transformer of 4.06 M parameters: with `guidance` like FLUX.1-dev, without like FLUX.1-schnell."""
    return FluxTransformer2DModel(
        in_channels=TOKEN_WIDTH,
        num_layers=2,
        num_single_layers=5,
        attention_head_dim=32,
        num_attention_heads=5,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 14, 14),
    )


def build_clip_text() -> CLIPTextModel:
    """Build the CLIP text encoder. It provides only the pooled vector, so two layers are enough."""
    return networks.build_text_encoder(layers=2)


def build_t5() -> T5EncoderModel:
    words = tokenizer.build()
    return T5EncoderModel(
        T5Config(
            vocab_size=len(words),
            d_model=TEXT_WIDTH,
            d_kv=32,
            num_heads=4,
            d_ff=2 * TEXT_WIDTH,
            num_layers=3,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


@torch.no_grad()
def init_adaln_zero(transformer: FluxTransformer2DModel) -> None:
    """Initialise as DiT's adaLN-zero: every block is the identity, and the velocity is 0."""
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    layers = [
        getattr(block, name)
        for block in blocks
        for name in ("norm1", "norm1_context", "norm")
        if hasattr(block, name)
    ]
    for layer in (*(norm.linear for norm in layers), transformer.norm_out.linear, transformer.proj_out):
        layer.weight.zero_()
        layer.bias.zero_()


def embed_latents_in_fp32(transformer: FluxTransformer2DModel) -> None:
    """Make this instance embed latents in fp32 even under autocast.

    The transformer rounds sigma to the dtype of the embedded latents before it multiplies by 1000. In bf16 that would
    give steps of four thousandths, unlike inference in fp32 or fp16.
    """
    embed = transformer.x_embedder

    def forward(latents: Tensor) -> Tensor:
        with torch.autocast(latents.device.type, enabled=False):
            return nn.functional.linear(latents.float(), embed.weight, embed.bias)

    embed.forward = forward


def pack(latents: Tensor) -> Tensor:
    """(N, 16, 16, 16) channels, rows, columns -> (N, 64 tokens, 64): each 2x2 patch is one token, channels first."""
    n = len(latents)
    cells = latents.reshape(n, CHANNELS, PATCHES, 2, PATCHES, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(n, TOKENS, TOKEN_WIDTH)


def unpack(tokens: Tensor) -> Tensor:
    """The inverse of `pack`."""
    cells = tokens.reshape(len(tokens), PATCHES, PATCHES, CHANNELS, 2, 2)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), CHANNELS, LATENT_SIDE, LATENT_SIDE)


class PositionIds(NamedTuple):
    """Positions for the rotary embedding: words all at 0, patches at (0, row, column)."""

    text: Tensor  # (32, 3)
    image: Tensor  # (64, 3)


def position_ids(device: str) -> PositionIds:
    at = torch.arange(PATCHES, device=device, dtype=torch.float32)
    rows, columns = torch.meshgrid(at, at, indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(TOKENS, 3)
    return PositionIds(torch.zeros(tokenizer.MAX_LENGTH, 3, device=device), image)


class PromptEmbeddings(NamedTuple):
    """An encoded batch of prompts."""

    words: Tensor  # (N, 32, 128) from T5
    pooled: Tensor  # (N, 128) from CLIP


def encode(clip: nn.Module, t5: nn.Module, ids: Tensor) -> PromptEmbeddings:
    """Encode token ids (N, 32) with both encoders, which share the tokenizer."""
    return PromptEmbeddings(t5(ids).last_hidden_state, clip(ids).pooler_output)


def velocity(
    transformer: nn.Module,
    latents: Tensor,
    sigma: Tensor,
    prompts: PromptEmbeddings,
    positions: PositionIds,
    guidance: Tensor | None,
) -> Tensor:
    """Predict noise - image, (N, 64, 64), at noise level `sigma` (N,) in 0..1, for guidance scales (N,)."""
    return transformer(
        hidden_states=latents,
        timestep=sigma,
        guidance=guidance,
        pooled_projections=prompts.pooled,
        encoder_hidden_states=prompts.words,
        txt_ids=positions.text,
        img_ids=positions.image,
        return_dict=False,
    )[0]


def sigmas(steps: int) -> list[float]:
    """Return the noise levels of FluxPipeline with the folder's scheduler, including the final 0."""
    return [1 - step / steps for step in range(steps + 1)]


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build FLUX.1-schnell's scheduler. FLUX.1-dev's shift for large images is not needed for 64 tokens."""
    return FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)


def save(
    folder: Path,
    vae: AutoencoderKL,
    transformer: FluxTransformer2DModel,
    clip: CLIPTextModel,
    t5: T5EncoderModel,
) -> None:
    """Write the fp16 pipeline folder atomically."""
    pipe = FluxPipeline(
        scheduler=build_scheduler(),
        vae=networks.half(vae, networks.build_vae(CHANNELS)),
        text_encoder=networks.half(clip, build_clip_text()),
        tokenizer=tokenizer.build(),
        text_encoder_2=networks.half(t5, build_t5()),
        tokenizer_2=tokenizer.build(),
        transformer=networks.half(transformer, build_transformer()),
    )
    with networks.atomic_folder(folder) as unsaved:
        pipe.save_pretrained(unsaved, safe_serialization=True)
        for name in ("text_encoder", "text_encoder_2"):
            networks.load_in_fp32(unsaved / name)


def save_schnell(folder: Path, transformer: FluxTransformer2DModel) -> None:
    """Write only the four-step transformer; everything else is tiny-flux's."""
    with networks.atomic_folder(folder) as unsaved:
        half = networks.half(transformer, build_transformer(guidance=False))
        half.save_pretrained(unsaved / "transformer", safe_serialization=True)


def load_schnell(weights: Path, dtype: torch.dtype = torch.float32) -> FluxPipeline:
    """Load the four-step pipeline from both folders."""
    fast = FluxTransformer2DModel.from_pretrained(weights / SCHNELL_FOLDER / "transformer", dtype=dtype)
    return FluxPipeline.from_pretrained(weights / FOLDER, transformer=fast, dtype=dtype)


def load_text(folder: Path, device: str) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Load both encoders of a finished folder in fp32, frozen."""
    clip = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    t5 = T5EncoderModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32)
    return tuple(model.to(device).eval().requires_grad_(False) for model in (clip, t5))


def load_transformer(folder: Path, device: str) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(folder / "transformer").to(device)


@torch.no_grad()
def without_guidance(transformer: FluxTransformer2DModel, scale: float = GUIDANCE) -> FluxTransformer2DModel:
    """Return a transformer without guidance input that predicts what the given one does at one scale.

    The guidance embedding is added to the timestep embedding, so at a fixed scale it is a bias.
    """
    fast = build_transformer(guidance=False).to(transformer.device)
    old = transformer.time_text_embed
    state = {key: value for key, value in transformer.state_dict().items() if "guidance_embedder" not in key}
    fast.load_state_dict(state)
    embedded = old.time_proj(torch.tensor([scale * 1000], device=transformer.device))
    fast.time_text_embed.timestep_embedder.linear_2.bias += old.guidance_embedder(embedded)[0]
    return fast
