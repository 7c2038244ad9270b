"""Random weights that keep activations in the range of a trained model, at any depth: gains of layers.

Every weight is sampled from N(0, gain^2 / fan_in), so that an input of unit second moment gives an output of gain^2.
Rules list where the gain is not 1, for three reasons:

- After an activation function the second moment is no longer 1 (SiLU: 0.356); the next layer compensates.
- A residual stream gains the variance of each of its n branches. The last layer of every branch is scaled by
  1 / sqrt(n), so that the stream's variance about doubles over the network, whether it has 2 blocks or 57.
- A UNet's output is its input's noise, plus a small part that depends on text and time. The optimal denoiser of
  Gaussian images does the same; otherwise the final latents would be 15 times too large for any VAE.

Moments are those of N(0, 1); attention outputs are smaller than their inputs, since they average over many tokens.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vivace.architectures.family import RandomWeights, Rules

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
THROUGH_TANH = 0.424
"""Root of the second moment of a gate that is tanh(z), z ~ N(0, MODULATION^2)."""
SIGMOID = 0.541
"""Root of the second moment of sigmoid(z), z ~ N(0, 1)."""
ONE_FRAME = math.sqrt(3)
"""Of the three frames that a causal 3-D convolution sees, two are zero where there is a single one."""


def count(module: Any, class_name: str) -> int:
    return sum(type(child).__name__ == class_name for child in module.modules())


def embedders(number: int) -> Rules:
    """Gains of timestep, guidance, pooled text: two layers each, and their sum has unit second moment."""
    return [
        (r"(timestep|guidance)_embedder\.linear_1", SINUSOID),
        (r"_embedder\.linear_2", SILU / math.sqrt(number)),
    ]


def double_and_single(transformer: Any, embedded: int) -> Rules:
    """Gains of FLUX.1's blocks and of what is around them, such as a sum of `embedded` embeddings."""
    config = transformer.config
    # Each branch is multiplied by its gate.
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers + config.num_single_layers))
    return [
        *embedders(embedded),
        (r"norm(1|1_context|_out)?\.linear", MODULATION * SILU),
        (r"ff(_context)?\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        # Four fifths of its input come from the MLP; the attention part is far smaller.
        (r"single_transformer_blocks\.\d+\.proj_out", math.sqrt(5 / 4) * GELU * last),
        (r"to_[qkv]\.|add_[qkv]_proj|ff(_context)?\.net\.0|proj_mlp|^proj_out", MODULATED**-0.5),
    ]


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


def root_of_moment(config: Any) -> float:
    squares = [s**2 + m**2 for s, m in zip(config.latents_std, config.latents_mean, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def vae_gains(vae: Any) -> Rules:
    config = vae.config
    branches = {part: count(getattr(vae, part), "ResnetBlock2D") + 1 for part in ("encoder", "decoder")}
    # FLUX.2's latents have running statistics instead, which are 0 and 1.
    has_moments = config.get("latents_std") is not None
    latents = root_of_moment(config) if has_moments else 1 / config.get("scaling_factor", 1.0)
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


def _qwen_vae(vae: Any) -> Rules:
    branches = count(vae.decoder, "QwenImageResidualBlock") + 1
    return [
        (r"^post_quant_conv", 1 / root_of_moment(vae.config)),
        (r"conv1\.", SILU * ONE_FRAME),
        (r"conv2\.", SILU * ONE_FRAME / math.sqrt(branches)),
        (r"attentions.*proj", 1 / math.sqrt(branches)),
        (r"conv_in", ONE_FRAME),
        (r"decoder\.conv_out", 0.5 * SILU * ONE_FRAME),  # images are in -1 .. 1
    ]


def _tiny_vae(vae: Any) -> Rules:
    parts = (vae.encoder, vae.decoder)
    branches = max(sum(name.endswith("conv.4.bias") for name, _ in part.named_parameters()) for part in parts)
    *_, (last, _) = vae.decoder.named_parameters()
    return [
        # No norms: ReLU halves the second moment that a gain of sqrt(2) doubles, except at the end of a branch.
        (r"conv\.4\.", 1 / math.sqrt(branches)),
        (r"pool\.3\.", RELU / math.sqrt(branches)),
        (rf"decoder\.{re.escape(last.removesuffix('bias'))}", 0.2),  # images are in 0 .. 1
        (r"layers\.\d+\.conv\.weight", 1.0),  # of frames, without an activation
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


def _brighten(vae: Any) -> None:
    *_, bias = vae.decoder.parameters()
    bias += 0.5  # the grey between black and white


_LANGUAGE_MODEL = RandomWeights(_language_model)
_CLIP = RandomWeights(_clip)
SHARED: dict[str, RandomWeights] = {
    "AutoencoderKL": RandomWeights(vae_gains),
    "AutoencoderKLQwenImage": RandomWeights(_qwen_vae),
    **dict.fromkeys(
        (f"AutoencoderTiny{latents}" for latents in ("", "Flux2", "QwenImage", "QwenImage21")),
        RandomWeights(_tiny_vae, finish=_brighten),
    ),
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "T5EncoderModel": RandomWeights(_t5),
    **dict.fromkeys(
        (
            "GlmModel",
            "Mistral3ForConditionalGeneration",
            "Mistral3Model",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3Model",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLModel",
        ),
        _LANGUAGE_MODEL,
    ),
}
"""Of networks that are not one family's own, by class."""
