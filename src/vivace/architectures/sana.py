"""Sana and Sana-Sprint: linear attention over the image, attention to the text, convolutions in the MLP.

Sana-Sprint's guidance is an input of the transformer. Source: diffusers, SanaTransformer2DModel, SanaPipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import family
from vivace.architectures.components import (
    Architecture,
    ComponentConfig,
    of_diffusers,
    of_transformers,
    reconfigure,
)
from vivace.architectures.entry import Entry, Hub
from vivace.architectures.gains import GELU, MODULATED, MODULATION, RELU, SILU, count, embedders


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    timestep = call[0][4]  # after the tokens, their mask, the text and its mask
    modulation = block.scale_shift_table[None] + timestep.reshape(image.shape[0], 6, -1)
    shift, scale = modulation.chunk(6, dim=1)[:2]
    return block.norm1(image) * (1 + scale) + shift


def _gains(transformer: Any) -> family.Rules:
    branches = 3 * transformer.config.num_layers
    last = 1 / (MODULATION * math.sqrt(branches))
    return [
        *embedders(2 if transformer.config.guidance_embeds else 1),
        (r"time_embed\.linear", MODULATION * SILU),
        (r"caption_projection\.linear_2", GELU),
        (r"attn1\.to_out\.0", last),
        (r"attn2\.to_out\.0", 1 / math.sqrt(branches)),  # has no gate
        (r"conv_depth", SILU),
        (r"conv_point", SILU * last),
        (r"attn1\.to_[qkv]\.|conv_inverted", MODULATED**-0.5),
        (r"^proj_out", 3**-0.5),  # modulated by an embedding of unit variance
    ]


def _vae_gains(vae: Any) -> family.Rules:
    return [
        (r"decoder\.conv_in", 1 / vae.config.scaling_factor),
        (r"conv2\.|conv_depth|conv_point", SILU),
        (r"decoder\.conv_out", 0.5 * RELU),  # images are in -1 .. 1
    ]


def _vae_norms(vae: Any) -> family.Rules:
    """Its branches end with a norm."""
    branches = count(vae.decoder, "ResBlock") + 2 * count(vae.decoder, "EfficientViTBlock")
    return [(r"decoder\.up_blocks.*norm", 1 / math.sqrt(branches))]


def _text_gains(encoder: Any) -> family.Rules:
    # Embeddings are multiplied by the root of their width.
    return [(r"embed_tokens", encoder.config.hidden_size**-0.5), (r"down_proj", GELU)]


def _text_norms(encoder: Any) -> family.Rules:
    """Its norms add 1 to their weight, and its branches end with one."""
    branches = 2 * encoder.config.num_hidden_layers
    return [(r"post_(attention|feedforward)_layernorm", branches**-0.5 - 1), (r"norm", 0.0)]


# google/gemma-2-2b-it without its head, as text_encoder of Sana. Its configuration is the class's default.
GEMMA2_2B = of_transformers("Gemma2Model", vocab_size=256000, hidden_size=2304, num_hidden_layers=26)
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
# Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers: the class's default.
SANA_1600M = of_diffusers("SanaTransformer2DModel", num_layers=20, sample_size=32)
# Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers: guidance is an embedded input.
SANA_SPRINT_1600M = reconfigure(SANA_1600M, guidance_embeds=True, qk_norm="rms_norm_across_heads")
_SANA_FLOW = of_diffusers(
    "DPMSolverMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
)
_SCM = of_diffusers("SCMScheduler")


def _publish(
    name: str,
    transformer: ComponentConfig,
    sampler: ComponentConfig,
    title: str,
    labels: str,
    step_flop: int,
    repo: str,
    **own: Any,
) -> family.PublishedModel:
    # One latent cell has 32 x 32 pixels. Weights are NVIDIA's, the text encoder is Gemma 2 with terms of its own.
    entry = Entry(
        name=name,
        licence="NSCL v2, and Gemma",
        origin=Hub(repo=f"Efficient-Large-Model/{repo}", variants=("bf16",), download_bytes=9_060_000_000),
        size_multiple=32,
        # Otherwise the pipeline draws the nearest of its sizes, of a million pixels each, and scales the image.
        arguments={"use_resolution_binning": False},
        **own,
    )
    parts = {"transformer": transformer, "vae": SANA_VAE, "text_encoder": GEMMA2_2B}
    return family.PublishedModel(
        entry, Architecture.of(entry, parts, sampler, {"text_encoder": 300}), title, labels, step_flop
    )


_MODELS = (
    # Steps and guidance from diffusers' documentation.
    _publish(
        "sana-1600m",
        SANA_1600M,
        _SANA_FLOW,
        "Sana 1.6B",
        r"sana(?!.*sprint).*1\.?6",
        5_933_322_321_920,
        "Sana_1600M_1024px_BF16_diffusers",
        summary="Sana 1.6B at 1024x1024: linear attention, latents 32 times smaller than the image",
        pipeline="SanaPipeline",
        num_inference_steps=20,
        guidance_scale=4.5,
    ),
    # Steps and guidance are the defaults of its pipeline. Guidance is an input of the transformer.
    _publish(
        "sana-sprint-1600m",
        SANA_SPRINT_1600M,
        _SCM,
        "Sana-Sprint 1.6B",
        r"sana[ _-]?sprint.*1\.?6",
        2_966_672_343_040,
        "Sana_Sprint_1.6B_1024px_diffusers",
        summary="Sana 1.6B, distilled to 1 to 4 steps",
        pipeline="SanaSprintPipeline",
        num_inference_steps=2,
        guidance_scale=4.5,
    ),
)


def _sprint_without_values(pipe: Any, height: int, width: int) -> None:
    """Leave the timesteps on the meta device: this pipeline reads none, and computes with their tensors."""
    del pipe.scheduler.set_timesteps


SANA = family.Family(
    name="Sana",
    denoiser="SanaTransformer2DModel",
    pipelines=(
        family.Pipeline(
            "SanaPipeline",
        ),
        family.Pipeline(
            "SanaSprintPipeline",
            run_without_values=_sprint_without_values,
        ),
    ),
    files=family.SingleFiles(
        (
            family.Signature("Sana", ("attention_y_norm.weight",)),
            family.Signature(
                "Sana in diffusers' layout",
                ("caption_norm.weight", "transformer_blocks.0.ff.conv_inverted.weight"),
            ),
        )
    ),
    lora_layers=("caption_projection",),
    models=_MODELS,
    random_weights={
        "SanaTransformer2DModel": family.RandomWeights(_gains),
        "AutoencoderDC": family.RandomWeights(_vae_gains, _vae_norms),
        "Gemma2Model": family.RandomWeights(_text_gains, _text_norms),
    },
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=family.output_of("patch_embed"),
        leaving=family.input_of("norm_out"),
        modulated=_modulated,
        grid=family.grid_of_latents(family.patch_size),
        text=None,
        added_between=("controlnet_block_samples",),
    ),
    doubled=family.BatchDoubling(),
    cells=family.patch_size,
)
