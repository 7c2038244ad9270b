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

from vivace.models.random_flow_weights import (
    GELU,
    MODULATED,
    MODULATION,
    NORMS,
    RELU,
    RULES,
    SILU,
    SINUSOID,
    Rules,
    count,
)

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
