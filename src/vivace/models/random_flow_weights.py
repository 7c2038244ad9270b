"""Gains of the random weights of flow-matching transformers after FLUX.1, their VAEs and language models.

As in `vivace.models.random_weights`, which says what a gain is and why. A list of rules is of pairs: a pattern of
parameter names, and a gain or, for norms, the mean of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# Gains that compensate for an activation function: 1 / sqrt of the second moment of f(z), z ~ N(0, 1).
SILU, GELU, RELU = 0.3558**-0.5, 0.4252**-0.5, 0.5**-0.5
SINUSOID = 0.5**-0.5
"""A timestep embedding consists of sines and cosines: second moment 1/2."""
MODULATION = 0.5
"""Standard deviation of adaLN's shift, scale and gate; those of a trained FLUX are of that order."""
MODULATED = (1 + MODULATION**2) + MODULATION**2
"""Second moment of norm(x) * (1 + scale) + shift."""
SCALED = 1 + MODULATION**2
"""The same without a shift."""
_THROUGH_TANH = 0.424
"""Root of the second moment of a gate that is tanh(z), z ~ N(0, MODULATION^2)."""
_SIGMOID = 0.541
"""Root of the second moment of sigmoid(z), z ~ N(0, 1)."""
_ONE_FRAME = math.sqrt(3)
"""Of the three frames that a causal 3-D convolution sees, two are zero where there is a single one."""

Rules = list[tuple[str, float]]


def count(module: Any, class_name: str) -> int:
    return sum(type(child).__name__ == class_name for child in module.modules())


def _embedders(number: int) -> Rules:
    """Gains of timestep, guidance, pooled text: two layers each, and their sum has unit second moment."""
    return [
        (r"(timestep|guidance)_embedder\.linear_1", SINUSOID),
        (r"_embedder\.linear_2", SILU / math.sqrt(number)),
    ]


def _sd3(transformer: Any) -> Rules:
    config = transformer.config
    branches = 2 * config.num_layers + len(config.dual_attention_layers)
    last = 1 / (MODULATION * math.sqrt(branches))  # each branch is multiplied by its gate
    return [
        *_embedders(2),
        (r"norm(1|1_context|_out)\.linear", MODULATION * SILU),
        (r"ff(_context)?\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|ff(_context)?\.net\.0|^proj_out", MODULATED**-0.5),
    ]


def _qwen_image(transformer: Any) -> Rules:
    last = 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers))
    return [
        *_embedders(1),
        (r"(img|txt)_mod\.1|norm_out\.linear", MODULATION * SILU),
        (r"(img|txt)_mlp\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|(img|txt)_mlp\.net\.0|^proj_out", MODULATED**-0.5),
    ]


def _qwen_image21(transformer: Any) -> Rules:
    last = 1 / (_THROUGH_TANH * math.sqrt(2 * transformer.config.num_layers))
    return [
        *_embedders(1),
        (r"txt_in\.out_layer", GELU),
        (r"^modulation\.1|norm_out\.linear", MODULATION * SILU),
        (r"img_mlp\.out", SILU * last),
        (r"to_out\.0", last),
        (r"to_[qkv]\.|img_mlp\.|^proj_out", SCALED**-0.5),
    ]


def _qwen_image21_norms(_: Any) -> Rules:
    """The norm of its text adds 1 to its weight."""
    return [(r"text_norm", 0.0)]


def _krea2(transformer: Any) -> Rules:
    config = transformer.config
    fusing = 1 / math.sqrt(2 * (config.num_layerwise_text_blocks + config.num_refiner_text_blocks))
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers))
    return [
        (r"time_embed\.linear_1", SINUSOID),
        (r"time_embed\.linear_2|txt_in\.linear_2", GELU),
        (r"time_mod_proj", MODULATION * GELU),
        (r"text_fusion.*to_out\.0", fusing / _SIGMOID),
        (r"text_fusion.*down", SILU * fusing),
        (r"text_fusion", 1.0),
        (r"to_out\.0", last / _SIGMOID),
        (r"ff\.down", SILU * last),
        (r"to_([qkv]|gate)\.|ff\.(gate|up)", MODULATED**-0.5),
        (r"final_layer\.linear", 3**-0.5),  # modulated by an embedding of unit variance
    ]


def _krea2_norms(_: Any) -> Rules:
    """All of its norms add 1 to their weight."""
    return [(r"norm", 0.0)]


def _cogview4(transformer: Any) -> Rules:
    last = 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers))
    return [
        (r"condition_embedder\.linear_1", SINUSOID),
        *_embedders(2),
        (r"norm(1|_out)\.linear", MODULATION * SILU),
        (r"ff\.net\.2", GELU * last),
        (r"to_out\.0", last),
        (r"to_[qkv]\.|ff\.net\.0|^proj_out", MODULATED**-0.5),
    ]


def _flux2(transformer: Any) -> Rules:
    config = transformer.config
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers + config.num_single_layers))
    # The MLP's part of a single block's input to `to_out`; the attention's part is far smaller.
    share = config.mlp_ratio / (1 + config.mlp_ratio)
    return [
        *_embedders(2 if config.guidance_embeds else 1),
        (r"modulation(_img|_txt)?\.linear|norm_out\.linear", MODULATION * SILU),
        (r"linear_out", SILU * last),
        (r"single_transformer_blocks\.\d+\.attn\.to_out", SILU * last / math.sqrt(share)),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|linear_in|to_qkv_mlp_proj|^proj_out", MODULATED**-0.5),
    ]


def _z_image(transformer: Any) -> Rules:
    scaled = SCALED**-0.5
    return [
        (r"t_embedder\.mlp\.0", SINUSOID),
        (r"t_embedder\.mlp\.2", SILU),
        (r"final_layer.*adaLN_modulation", MODULATION * SILU),
        (r"adaLN_modulation", MODULATION),
        (r"feed_forward\.w2", SILU),
        (r"to_[qkv]\.|feed_forward\.w[13]|final_layer.*linear", scaled),
    ]


def _z_image_norms(transformer: Any) -> Rules:
    """Its branches end with a norm."""
    return [(r"(attention|ffn)_norm2", 1 / (MODULATION * math.sqrt(2 * transformer.config.n_layers)))]


def _sana(transformer: Any) -> Rules:
    branches = 3 * transformer.config.num_layers
    last = 1 / (MODULATION * math.sqrt(branches))
    return [
        *_embedders(2 if transformer.config.guidance_embeds else 1),
        (r"time_embed\.linear", MODULATION * SILU),
        (r"caption_projection\.linear_2", GELU),
        (r"attn1\.to_out\.0", last),
        (r"attn2\.to_out\.0", 1 / math.sqrt(branches)),  # has no gate
        (r"conv_depth", SILU),
        (r"conv_point", SILU * last),
        (r"attn1\.to_[qkv]\.|conv_inverted", MODULATED**-0.5),
        (r"^proj_out", 3**-0.5),  # modulated by an embedding of unit variance
    ]


def _qwen_vae(vae: Any) -> Rules:
    config = vae.config
    squares = [s**2 + m**2 for s, m in zip(config.latents_std, config.latents_mean, strict=True)]
    latents = math.sqrt(sum(squares) / len(squares))
    branches = count(vae.decoder, "QwenImageResidualBlock") + 1
    return [
        (r"^post_quant_conv", 1 / latents),
        (r"conv1\.", SILU * _ONE_FRAME),
        (r"conv2\.", SILU * _ONE_FRAME / math.sqrt(branches)),
        (r"attentions.*proj", 1 / math.sqrt(branches)),
        (r"conv_in", _ONE_FRAME),
        (r"decoder\.conv_out", 0.5 * SILU * _ONE_FRAME),  # images are in -1 .. 1
    ]


def _qwen21_vae(vae: Any) -> Rules:
    """Qwen-Image's with convolutions of one frame. Each stage adds its input to its output, which ends in a norm."""
    config = vae.config
    squares = [s**2 + m**2 for s, m in zip(config.latents_std, config.latents_mean, strict=True)]
    branches = count(vae.decoder, "QwenImage21ResidualBlock") + 1
    return [
        (r"^post_quant_conv", math.sqrt(len(squares) / sum(squares))),
        (r"conv1\.", SILU),
        (r"conv2\.", SILU / math.sqrt(branches)),
        (r"attentions.*proj", 1 / math.sqrt(branches)),
        (r"decoder\.conv_out", 0.5 * SILU),  # images are in -1 .. 1
    ]


def _dc_vae(vae: Any) -> Rules:
    return [
        (r"decoder\.conv_in", 1 / vae.config.scaling_factor),
        (r"conv2\.|conv_depth|conv_point", SILU),
        (r"decoder\.conv_out", 0.5 * RELU),  # images are in -1 .. 1
    ]


def _dc_vae_norms(vae: Any) -> Rules:
    """Its branches end with a norm."""
    branches = count(vae.decoder, "ResBlock") + 2 * count(vae.decoder, "EfficientViTBlock")
    return [(r"decoder\.up_blocks.*norm", 1 / math.sqrt(branches))]


def _language_model(encoder: Any) -> Rules:
    config = getattr(encoder.config, "text_config", encoder.config)
    branches = 2 * config.num_hidden_layers
    return [
        (
            r"vision|visual",
            1.0,
        ),  # called by models that edit alone; its branches shrink, and it ends with a norm
        (r"o_proj", 1 / math.sqrt(branches)),
        (r"down_proj", SILU / math.sqrt(branches)),
    ]


def _gemma2(encoder: Any) -> Rules:
    # Embeddings are multiplied by the root of their width.
    return [(r"embed_tokens", encoder.config.hidden_size**-0.5), (r"down_proj", GELU)]


def _gemma2_norms(encoder: Any) -> Rules:
    """Its norms add 1 to their weight, and its branches end with one."""
    branches = 2 * encoder.config.num_hidden_layers
    return [(r"post_(attention|feedforward)_layernorm", branches**-0.5 - 1), (r"norm", 0.0)]


RULES: dict[str, Callable[[Any], Rules]] = {
    "SD3Transformer2DModel": _sd3,
    "SanaTransformer2DModel": _sana,
    "ZImageTransformer2DModel": _z_image,
    "QwenImageTransformer2DModel": _qwen_image,
    "QwenImage21Transformer2DModel": _qwen_image21,
    "Flux2Transformer2DModel": _flux2,
    "CogView4Transformer2DModel": _cogview4,
    "Krea2Transformer2DModel": _krea2,
    "AutoencoderDC": _dc_vae,
    "AutoencoderKLQwenImage": _qwen_vae,
    "AutoencoderKLQwenImage21": _qwen21_vae,
    "Gemma2Model": _gemma2,
    "GlmModel": _language_model,
    "Qwen3Model": _language_model,
    "Qwen3ForCausalLM": _language_model,
    "Qwen2_5_VLForConditionalGeneration": _language_model,
    "Qwen3VLForConditionalGeneration": _language_model,
    "Qwen3VLModel": _language_model,
    "Mistral3ForConditionalGeneration": _language_model,
}
NORMS: dict[str, Callable[[Any], Rules]] = {
    "ZImageTransformer2DModel": _z_image_norms,
    "QwenImage21Transformer2DModel": _qwen_image21_norms,
    "Krea2Transformer2DModel": _krea2_norms,
    "AutoencoderDC": _dc_vae_norms,
    "Gemma2Model": _gemma2_norms,
}
"""Mean weights of norms where they are not 1."""
