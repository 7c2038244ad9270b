"""The published architectures of flow-matching transformers after FLUX.1; see `vivace.models.architectures`.

The repositories' own config.json files were not at hand. Sources: the defaults of diffusers 0.42.1 and transformers,
which are those of the published models, diffusers' conversion scripts (convert_flux2_to_diffusers.py,
convert_sana_to_diffusers.py, convert_dcae_to_diffusers.py), and configurations that public repositories quote from the
hub. The number of parameters of every denoiser and language model was compared with the published one.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.components import Architecture, Component, of_diffusers, of_transformers, replaced

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
# --- text encoders --------------------------------------------------------------------------------------------------

# Of SD 3.5, which reads the projected vector.
CLIP_L_PROJECTED = replaced(CLIP_L).model_copy(update={"class_name": "CLIPTextModelWithProjection"})


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": _rope(1_000_000.0),
}
_QWEN3_4B: dict[str, Any] = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
# Qwen/Qwen3-4B without its head, as text_encoder of Z-Image.
QWEN3_4B_BODY = of_transformers("Qwen3Model", **_QWEN3_4B)
# Qwen/Qwen3-4B and Qwen3-8B, as text_encoder of FLUX.2 [klein] 4B and 9B.
QWEN3_4B = of_transformers("Qwen3ForCausalLM", **_QWEN3_4B)
QWEN3_8B = of_transformers("Qwen3ForCausalLM", **_QWEN3, hidden_size=4096, intermediate_size=12288)
# Qwen/Qwen2.5-VL-7B-Instruct, as text_encoder of Qwen-Image, which loads its vision tower and does not call it, and of
# Qwen-Image-Edit, which does. The rest of the tower's configuration is the class's default.
QWEN25_VL_7B = of_transformers(
    "Qwen2_5_VLForConditionalGeneration",
    text_config={
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "max_window_layers": 28,
        "rope_parameters": _rope(1_000_000.0) | {"mrope_section": [16, 24, 24]},
    },
    vision_config={"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
)
# Qwen/Qwen3-VL-8B-Instruct, as text_encoder of Qwen-Image-2.1, which draws from text without its vision tower. The rest
# of the tower's configuration is the class's default.
QWEN3_VL_8B = of_transformers(
    "Qwen3VLForConditionalGeneration",
    text_config={
        "model_type": "qwen3_vl_text",
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "rope_parameters": _rope(5_000_000.0) | {"mrope_section": [24, 20, 20]},
    },
    vision_config={"model_type": "qwen3_vl_vision", "hidden_size": 1152, "out_hidden_size": 4096},
)
# Qwen/Qwen3-VL-4B-Instruct without its head, as text_encoder of Krea 2, which does not call its vision tower.
QWEN3_VL_4B_BODY = of_transformers(
    "Qwen3VLModel",
    text_config={
        "model_type": "qwen3_vl_text",
        **_QWEN3_4B,
        "max_position_embeddings": 262144,
        "rope_parameters": _rope(5_000_000.0) | {"mrope_section": [24, 20, 20]},
    },
    vision_config={
        "model_type": "qwen3_vl_vision",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    tie_word_embeddings=True,
)
# mistralai/Mistral-Small-3.2-24B-Instruct-2506, as text_encoder of FLUX.2 [dev]; its vision tower is not called.
MISTRAL_SMALL_24B = of_transformers(
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
        "rope_parameters": _rope(1_000_000_000.0),
    },
    vision_config={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    tie_word_embeddings=False,
)
# google/gemma-2-2b-it without its head, as text_encoder of Sana. Its configuration is the class's default.
GEMMA2_2B = of_transformers("Gemma2Model", vocab_size=256000, hidden_size=2304, num_hidden_layers=26)

# THUDM/glm-4-9b-hf without its head, as text_encoder of CogView4. Its configuration is the class's default.
GLM4_9B = of_transformers("GlmModel", vocab_size=151552, hidden_size=4096, num_hidden_layers=40)

# --- VAEs -----------------------------------------------------------------------------------------------------------

# stabilityai/stable-diffusion-3.5-large, -medium
SD3_VAE = of_diffusers(
    "AutoencoderKL",
    **KL,
    sample_size=1024,
    latent_channels=16,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
# mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers: one latent cell for 32 x 32 pixels.
SANA_VAE = of_diffusers(
    "AutoencoderDC",
    latent_channels=32,
    **{
        f"{part}_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3 for part in ("encoder", "decoder")
    },
    **{f"{part}_block_out_channels": [128, 256, 512, 512, 1024, 1024] for part in ("encoder", "decoder")},
    **{f"{part}_qkv_multiscales": [[], [], [], [5], [5], [5]] for part in ("encoder", "decoder")},
    encoder_layers_per_block=[2, 2, 2, 3, 3, 3],
    decoder_layers_per_block=[3, 3, 3, 3, 3, 3],
    downsample_block_type="conv",
    upsample_block_type="interpolate",
    scaling_factor=0.41407,
)
# Qwen/Qwen-Image: a video VAE, called with one frame. Its configuration is the class's default.
QWEN_IMAGE_VAE = of_diffusers("AutoencoderKLQwenImage", base_dim=96, z_dim=16)
# Qwen/Qwen-Image-2.1: one latent cell for 16 x 16 pixels, and images with an alpha channel. The class's default.
QWEN_IMAGE21_VAE = of_diffusers("AutoencoderKLQwenImage21", base_dim=96, decoder_base_dim=144, z_dim=64)
# black-forest-labs/FLUX.2-dev: 32 channels, normalised by running statistics where others have a scaling factor.
FLUX2_VAE = of_diffusers("AutoencoderKLFlux2", **KL, sample_size=1024, latent_channels=32)

# THUDM/CogView4-6B, as in convert_cogview4_to_diffusers.py.
COGVIEW4_VAE = of_diffusers(
    "AutoencoderKL",
    **KL | {"block_out_channels": [128, 512, 1024, 1024], "layers_per_block": 3},
    sample_size=1024,
    latent_channels=16,
    scaling_factor=1.0,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
    mid_block_add_attention=False,
)

# --- denoisers ------------------------------------------------------------------------------------------------------

_SD3: dict[str, Any] = {
    "sample_size": 128,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
SD35_LARGE = of_diffusers(
    "SD3Transformer2DModel",
    **_SD3,
    num_layers=38,
    num_attention_heads=38,
    caption_projection_dim=2432,
    pos_embed_max_size=192,
)
# Its first 13 blocks have a second attention, over the image alone.
SD35_MEDIUM = of_diffusers(
    "SD3Transformer2DModel",
    **_SD3,
    num_layers=24,
    num_attention_heads=24,
    caption_projection_dim=1536,
    pos_embed_max_size=384,
    dual_attention_layers=list(range(13)),
)
# Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers: the class's default.
SANA_1600M = of_diffusers("SanaTransformer2DModel", num_layers=20, sample_size=32)
# Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers: guidance is an embedded input.
SANA_SPRINT_1600M = replaced(SANA_1600M, guidance_embeds=True, qk_norm="rms_norm_across_heads")
# Tongyi-MAI/Z-Image-Turbo
Z_IMAGE = of_diffusers(
    "ZImageTransformer2DModel", dim=3840, n_layers=30, n_heads=30, n_kv_heads=30, axes_lens=[1536, 512, 512]
)
# Qwen/Qwen-Image: the class's default.
QWEN_IMAGE = of_diffusers("QwenImageTransformer2DModel", num_layers=60, out_channels=16)
# Qwen/Qwen-Image-Edit-2511: the tokens of its sources are modulated by a timestep of 0.
QWEN_IMAGE_EDIT_2511 = replaced(QWEN_IMAGE, zero_cond_t=True)
# Qwen/Qwen-Image-2.1: the class's default.
QWEN_IMAGE21 = of_diffusers("QwenImage21Transformer2DModel", num_layers=32)
# black-forest-labs/FLUX.2-dev: the class's default.
FLUX2_DEV = of_diffusers("Flux2Transformer2DModel", num_layers=8, num_single_layers=48, guidance_embeds=True)
# black-forest-labs/FLUX.2-klein-4B and -9B: neither has a guidance input.
FLUX2_KLEIN_4B = of_diffusers(
    "Flux2Transformer2DModel",
    num_layers=5,
    num_single_layers=20,
    num_attention_heads=24,
    joint_attention_dim=7680,
    guidance_embeds=False,
)
FLUX2_KLEIN_9B = of_diffusers(
    "Flux2Transformer2DModel",
    num_layers=8,
    num_single_layers=24,
    num_attention_heads=32,
    joint_attention_dim=12288,
    guidance_embeds=False,
)

# krea/Krea-2-Raw and Krea-2-Turbo: the class's default.
KREA2 = of_diffusers("Krea2Transformer2DModel", num_layers=28)
# THUDM/CogView4-6B, as in the same script.
COGVIEW4 = of_diffusers(
    "CogView4Transformer2DModel", num_layers=28, num_attention_heads=32, attention_head_dim=128
)

# --- schedulers -----------------------------------------------------------------------------------------------------

_FLOW = "FlowMatchEulerDiscreteScheduler"
_SHIFTED = of_diffusers(_FLOW, shift=3.0)
# Its pipelines compute the shift themselves, from the number of tokens and of steps.
_FLUX2_FLOW = of_diffusers(_FLOW, shift=3.0, use_dynamic_shifting=True)
_QWEN_FLOW = of_diffusers(
    _FLOW, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
)
_SANA_FLOW = of_diffusers(
    "DPMSolverMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
)
_SCM = of_diffusers("SCMScheduler")
# Its pipeline computes the shift from the number of tokens; of Krea 2 Turbo it is 1.15.
_KREA2_FLOW = of_diffusers(_FLOW, use_dynamic_shifting=True, max_image_seq_len=6400)
# Its pipeline computes the shift from the number of tokens.
_COGVIEW4_FLOW = of_diffusers(
    _FLOW, base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
)

# --- models ---------------------------------------------------------------------------------------------------------


def _model(
    name: str,
    pipeline: str,
    parts: dict[str, Component],
    scheduler: Component,
    text_lengths: dict[str, int],
    tiny_vae: Component | None = None,
    **arguments: Any,
) -> Architecture:
    return Architecture(
        name=name,
        pipeline=pipeline,
        components=parts,
        text_lengths=text_lengths,
        scheduler=scheduler,
        tiny_vae=tiny_vae,
        height=1024,
        width=1024,
        arguments=arguments,
    )


def _sd35(name: str, transformer: Component) -> Architecture:
    parts = {
        "transformer": transformer,
        "vae": SD3_VAE,
        "text_encoder": CLIP_L_PROJECTED,
        "text_encoder_2": OPEN_CLIP_BIGG,
        "text_encoder_3": T5_XXL,
    }
    lengths = {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": 256}
    return _model(name, "StableDiffusion3Pipeline", parts, _SHIFTED, lengths, TAEF1)


def _qwen(name: str, pipeline: str, transformer: Component = QWEN_IMAGE) -> Architecture:
    parts = {"transformer": transformer, "vae": QWEN_IMAGE_VAE, "text_encoder": QWEN25_VL_7B}
    return _model(name, pipeline, parts, _QWEN_FLOW, {"text_encoder": 1024})


def _krea2(name: str, *, is_distilled: bool) -> Architecture:
    parts = {"transformer": KREA2, "vae": QWEN_IMAGE_VAE, "text_encoder": QWEN3_VL_4B_BODY}
    lengths = {"text_encoder": 512}
    return _model(name, "Krea2Pipeline", parts, _KREA2_FLOW, lengths, is_distilled=is_distilled)


def _klein(name: str, transformer: Component, text_encoder: Component) -> Architecture:
    parts = {"transformer": transformer, "vae": FLUX2_VAE, "text_encoder": text_encoder}
    return _model(name, "Flux2KleinPipeline", parts, _FLUX2_FLOW, {"text_encoder": 512}, is_distilled=True)


FLOW_ARCHITECTURES: tuple[Architecture, ...] = (
    _sd35("sd35-large", SD35_LARGE),
    _sd35("sd35-medium", SD35_MEDIUM),
    _model(
        "sana-1600m",
        "SanaPipeline",
        {"transformer": SANA_1600M, "vae": SANA_VAE, "text_encoder": GEMMA2_2B},
        _SANA_FLOW,
        {"text_encoder": 300},
    ),
    _model(
        "sana-sprint-1600m",
        "SanaSprintPipeline",
        {"transformer": SANA_SPRINT_1600M, "vae": SANA_VAE, "text_encoder": GEMMA2_2B},
        _SCM,
        {"text_encoder": 300},
    ),
    _model(
        "z-image-turbo",
        "ZImagePipeline",
        {"transformer": Z_IMAGE, "vae": FLUX_VAE, "text_encoder": QWEN3_4B_BODY},
        _SHIFTED,
        {"text_encoder": 512},
        TAEF1,
    ),
    # Qwen/Qwen-Image-2512 has Qwen-Image's components; so have those that edit, whose text encoder sees the image.
    _qwen("qwen-image", "QwenImagePipeline"),
    _qwen("qwen-image-2512", "QwenImagePipeline"),
    _qwen("qwen-image-edit", "QwenImageEditPipeline"),
    _qwen("qwen-image-edit-2509", "QwenImageEditPlusPipeline"),
    _qwen("qwen-image-edit-2511", "QwenImageEditPlusPipeline", QWEN_IMAGE_EDIT_2511),
    _model(
        "qwen-image-2.1",
        "QwenImage21Pipeline",
        {"transformer": QWEN_IMAGE21, "vae": QWEN_IMAGE21_VAE, "text_encoder": QWEN3_VL_8B},
        _QWEN_FLOW,
        {"text_encoder": 1024},
    ),
    _klein("flux2-klein-4b", FLUX2_KLEIN_4B, QWEN3_4B),
    _klein("flux2-klein-9b", FLUX2_KLEIN_9B, QWEN3_8B),
    _model(
        "flux2-dev",
        "Flux2Pipeline",
        {"transformer": FLUX2_DEV, "vae": FLUX2_VAE, "text_encoder": MISTRAL_SMALL_24B},
        _FLUX2_FLOW,
        {"text_encoder": 512},
    ),
    _model(
        "cogview4-6b",
        "CogView4Pipeline",
        {"transformer": COGVIEW4, "vae": COGVIEW4_VAE, "text_encoder": GLM4_9B},
        _COGVIEW4_FLOW,
        {"text_encoder": 1024},
    ),
    _krea2("krea-2-turbo", is_distilled=True),
    _krea2("krea-2-raw", is_distilled=False),
)
