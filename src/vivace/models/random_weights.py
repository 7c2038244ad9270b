"""Random weights that keep activations in the range of a trained model, at any depth.

Every weight is sampled from N(0, gain^2 / fan_in), so that an input of unit second moment gives an output of gain^2.
The tables below list where the gain is not 1, for three reasons:

- After an activation function the second moment is no longer 1 (SiLU: 0.356); the next layer compensates.
- A residual stream gains the variance of each of its n branches. The last layer of every branch is scaled by
  1 / sqrt(n), so that the stream's variance about doubles over the network, whether it has 2 blocks or 57.
- A UNet's output is its input's noise, plus a small part that depends on text and time. The optimal denoiser of
  Gaussian images does the same; otherwise the final latents would be 15 times too large for any VAE.

Biases are close to 0 and norm weights close to 1, but not exactly, so that a kernel that ignores them is detected.
Moments are those of N(0, 1); attention outputs are smaller than their inputs, since they average over many tokens.
"""

from __future__ import annotations

import math
import re
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
"""Pairs of a pattern of parameter names and a gain or, for norms, the mean of the weight."""


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
_BIAS = 0.02
_NORM_SPREAD = 0.1
_SIGMA_MAX = 14.6
"""Noise at the first step of Stable Diffusion's schedule, in standard deviations of its latents."""
_CARRIED = 1 - 1 / _SIGMA_MAX
"""Share of the noise that a UNet returns: subtracted sigma_max times, it leaves latents of unit variance."""
_OWN_OUTPUT = 0.1
"""Scale of the remaining output of a UNet, which a single step from sigma_max multiplies by sigma_max."""


def fill(module: Any, generator: Any) -> None:
    """Fill every parameter of a component in place, in the order of `named_parameters`.

    Args:
        module: of one of the classes that the tables of gains name.
        generator: a torch.Generator on the module's device.
    """
    kind = type(module).__name__
    gains = _compiled(_RULES[kind](module))
    norms = _compiled(NORMS[kind](module)) if kind in NORMS else []
    import torch

    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 or name.endswith("gamma"):
            is_bias = name.endswith("bias")
            mean = 0.0 if is_bias else _first(norms, name)
            spread = _BIAS if is_bias else _NORM_SPREAD * min(1.0, abs(mean) or 1.0)
            parameter.normal_(mean, spread, generator=generator)
            continue
        gain = _first(gains, name)
        fan_in = 1 if id(parameter) in embeddings else parameter[0].numel()
        parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
    if kind == "UNet2DConditionModel":
        _carry_noise_through(module)
    if kind == "AutoencoderTiny":
        module.decoder.layers[-1].bias += 0.5  # the grey between black and white


def _compiled(rules: Rules) -> list[tuple[re.Pattern[str], float]]:
    return [(re.compile(pattern), gain) for pattern, gain in rules]


def _first(rules: list[tuple[re.Pattern[str], float]], name: str) -> float:
    return next((gain for pattern, gain in rules if pattern.search(name)), 1.0)


def _unet(unet: Any) -> Rules:
    config = unet.config
    layers = config.transformer_layers_per_block
    inner = 3 * (layers if isinstance(layers, int) else max(layers))  # self-attention, cross-attention, MLP
    branches = count(unet, "ResnetBlock2D") + count(unet, "Transformer2DModel")
    embedded = 2 if config.addition_embed_type is not None else 1  # summed: time, and text with sizes
    return [
        (r"(time|add)_embedding\.linear_1", SINUSOID),
        (r"(time|add)_embedding\.linear_2", SILU / math.sqrt(embedded)),
        (r"time_emb_proj", SILU),
        (r"conv1\.", SILU),
        (r"conv2\.", SILU / math.sqrt(branches)),
        # The variance of the inner stream has doubled here.
        (r"attentions\.\d+\.proj_out", math.sqrt(0.5 / branches)),
        (r"to_out\.0", 1 / math.sqrt(inner)),
        (r"ff\.net\.2", GELU / math.sqrt(inner)),
        (r"^conv_out", _OWN_OUTPUT * SILU),
    ]


def _carry_noise_through(unet: Any) -> None:
    """Pass +x and -x of each latent channel from the first convolution to the last.

    They take the outermost skip connection, which the last ResNet block adds and the last normalisation scales to unit
    variance. There silu(x) - silu(-x) = x undoes the activation function.
    """
    channels = unet.config.in_channels
    carried = 2 * channels
    last = unet.up_blocks[-1].resnets[-1]
    # The channels of the skip connection come after those of the block below.
    skip = last.conv_shortcut.weight.shape[1] - unet.conv_in.weight.shape[0]
    silenced = [unet.conv_in, last.conv2, last.conv_shortcut]
    silenced += [block.proj_out for block in list(getattr(unet.up_blocks[-1], "attentions", []))[-1:]]
    for layer in silenced:
        layer.weight[:carried] = 0.0
        layer.bias[:carried] = 0.0
    middle = (unet.conv_in.kernel_size[0] // 2, unet.conv_out.kernel_size[0] // 2)
    unet.conv_norm_out.weight[:carried] = 1.0
    for channel in range(channels):
        for row, sign in ((channel, 1.0), (channels + channel, -1.0)):
            unet.conv_in.weight[row, channel, middle[0], middle[0]] = sign
            last.conv_shortcut.weight[row, skip + row, 0, 0] = 1.0
            if channel < unet.conv_out.weight.shape[0]:
                unet.conv_out.weight[channel, row, middle[1], middle[1]] = sign * _CARRIED


def _flux(transformer: Any) -> Rules:
    config = transformer.config
    branches = 2 * config.num_layers + config.num_single_layers
    # Each branch is multiplied by its gate.
    last = 1 / (MODULATION * math.sqrt(branches))
    embedded = 3 if config.guidance_embeds else 2  # summed: time, guidance, pooled text
    return [
        (r"(timestep|guidance)_embedder\.linear_1", SINUSOID),
        (r"_embedder\.linear_2", SILU / math.sqrt(embedded)),
        (r"norm(1|1_context|_out)?\.linear", MODULATION * SILU),
        (r"ff(_context)?\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        # Four fifths of its input come from the MLP; the attention part is far smaller.
        (r"single_transformer_blocks\.\d+\.proj_out", math.sqrt(5 / 4) * GELU * last),
        (r"to_[qkv]\.|add_[qkv]_proj|ff(_context)?\.net\.0|proj_mlp|^proj_out", MODULATED**-0.5),
    ]


def _vae(vae: Any) -> Rules:
    config = vae.config
    branches = {part: count(getattr(vae, part), "ResnetBlock2D") + 1 for part in ("encoder", "decoder")}
    if config.get("latents_std") is not None:
        squares = [s**2 + m**2 for s, m in zip(config.latents_std, config.latents_mean, strict=True)]
        latents = math.sqrt(sum(squares) / len(squares))
    else:
        # FLUX.2's latents have running statistics instead, which are 0 and 1.
        latents = 1 / config.get("scaling_factor", 1.0)
    first = r"post_quant_conv" if config.use_post_quant_conv else r"decoder\.conv_in"
    return [
        (first, 1 / latents),
        (r"conv1\.", SILU),
        *(
            (rf"{part}.*(conv2\.|to_out\.0)", SILU / math.sqrt(branches[part]))
            for part in ("encoder", "decoder")
        ),
        (r"encoder\.conv_out", SILU),
        (r"decoder\.conv_out", 0.5 * SILU),  # images are in -1 .. 1
    ]


def _tiny_vae(vae: Any) -> Rules:
    branches = max(count(part, "AutoencoderTinyBlock") for part in (vae.encoder, vae.decoder))
    last = len(vae.decoder.layers) - 1
    return [
        # No norms: ReLU halves the second moment that a gain of sqrt(2) doubles, except at the end of a branch.
        (r"conv\.4\.", 1 / math.sqrt(branches)),
        (rf"decoder\.layers\.{last}\.", 0.2),  # images are in 0 .. 1
        (r"", RELU),
    ]


def _clip(encoder: Any) -> Rules:
    branches = 2 * encoder.config.num_hidden_layers
    return [
        (r"(token|position)_embedding", math.sqrt(0.5)),  # their sum has unit variance
        (r"out_proj", 1 / math.sqrt(branches)),
        (r"fc2", GELU / math.sqrt(branches)),
    ]


def _t5(encoder: Any) -> Rules:
    branches = 2 * encoder.config.num_layers
    return [
        (r"SelfAttention\.q\.", encoder.config.d_kv**-0.5),  # T5 does not divide its logits by sqrt(d_kv)
        (r"SelfAttention\.o\.", 1 / math.sqrt(branches)),
        (r"\.wo\.", GELU / math.sqrt(branches)),
    ]


_RULES: dict[str, Callable[[Any], Rules]] = {
    "UNet2DConditionModel": _unet,
    "FluxTransformer2DModel": _flux,
    "AutoencoderKL": _vae,
    "AutoencoderKLFlux2": _vae,
    "AutoencoderTiny": _tiny_vae,
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": _clip,
    "T5EncoderModel": _t5,
    **RULES,
}
