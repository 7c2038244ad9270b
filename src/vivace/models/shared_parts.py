"""Components that several models share, as they are published; see `vivace.models.architectures`."""

from __future__ import annotations

from typing import Any

from vivace.models.architecture import of_diffusers, of_transformers

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
CLIP_L = of_transformers(
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
OPEN_CLIP_BIGG = of_transformers(
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
T5_XXL = of_transformers(
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

# Of Stable Diffusion, SDXL, SD 3.5, FLUX.1 and Z-Image.
KL: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}

# black-forest-labs/FLUX.1-dev's, which Z-Image has too.
FLUX_VAE = of_diffusers(
    "AutoencoderKL",
    **KL,
    sample_size=1024,
    latent_channels=16,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
# madebyollin/taef1; taesd3 has the same architecture.
TAEF1 = of_diffusers("AutoencoderTiny", latent_channels=16)
