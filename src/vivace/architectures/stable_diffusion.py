"""Stable Diffusion 1 and 2, SDXL: a UNet. Source: diffusers, UNet2DConditionModel and its pipelines.

SDXL's VAE overflows in fp16. Its config says so (force_upcast), and the pipeline then decodes in fp32. All SDXL models
here do this, since it gives the image as published. It costs time and about 4 GB at 1024x1024. Many people use
madebyollin/sdxl-vae-fp16-fix instead, which decodes in fp16 to slightly different pixels; these are other weights, and
so not part of a baseline.

The few-step LoRAs are less certain: that of LCM for SDXL uses "main", since its commit is unknown, and the settings of
Hyper-SD for SD 1.5 were not checked against its card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import (
    VAE_FILES,
    Embedded,
    Entry,
    FewSteps,
    Hub,
    SamplerEntry,
    StoredPart,
    embedded_entry,
)
from vivace.architectures.gains import GELU, SILU, SINUSOID, count

_SIGMA_MAX = 14.6
"""Noise at the first step of Stable Diffusion's schedule, in standard deviations of its latents."""
_CARRIED = 1 - 1 / _SIGMA_MAX
"""Share of the noise that a UNet returns: subtracted sigma_max times, it leaves latents of unit variance."""
_OWN_OUTPUT = 0.1
"""Scale of the remaining output of a UNet, which a single step from sigma_max multiplies by sigma_max."""


def _gains(unet: Any) -> family.Rules:
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


_TAESD = StoredPart(
    repo="madebyollin/taesd", revision="614f76814bbe30edbe2e627ace1c2234c81a2c0e", files=VAE_FILES
)
_TAESDXL = StoredPart(
    repo="madebyollin/taesdxl", revision="b20258aaef75ef61e659c1e0f14f251cf0ad153e", files=VAE_FILES
)

_RAIL = "CreativeML Open RAIL++-M"
_LIGHTNING = "c9a24f48e1c025556787b0c58dd67a091ece2e44"  # of ByteDance/SDXL-Lightning
_HYPER = "bc08d970a87c74c71209491d64e3525845698863"  # of ByteDance/Hyper-SD
_HALF_SDXL_BYTES = 6_940_000_000  # UNet 5.14 GB, text encoders 0.25 and 1.39, VAE 0.17

_SD15_VAE = components.of_diffusers("AutoencoderKL", **components.KL, sample_size=512, scaling_factor=0.18215)
# `force_upcast`: its activations overflow fp16, so the pipeline decodes in fp32 where the weights are fp16.
_SDXL_VAE = components.of_diffusers(
    "AutoencoderKL", **components.KL, sample_size=1024, scaling_factor=0.13025, force_upcast=True
)
_PLAYGROUND_VAE = components.reconfigure(
    _SDXL_VAE,
    scaling_factor=0.5,
    latents_mean=[-1.6574, 1.886, -1.383, 2.5155],
    latents_std=[8.4927, 5.9022, 6.5498, 5.2299],
)
_SD15_UNET = components.of_diffusers(
    "UNet2DConditionModel", sample_size=64, cross_attention_dim=768, attention_head_dim=8
)
_SDXL_UNET = components.of_diffusers(
    "UNet2DConditionModel",
    sample_size=128,
    down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    block_out_channels=[320, 640, 1280],
    transformer_layers_per_block=[1, 2, 10],
    attention_head_dim=[5, 10, 20],  # the number of heads, despite the name
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
# The guidance scale is an embedded input, so there is no second, unconditional call (latent-consistency/lcm-sdxl).
_LCM_UNET = components.reconfigure(_SDXL_UNET, time_cond_proj_dim=256)

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}

_PNDM = components.of_diffusers("PNDMScheduler", **_BETAS, skip_prk_steps=True, set_alpha_to_one=False)
_EULER = components.of_diffusers("EulerDiscreteScheduler", **_BETAS, timestep_spacing="leading")
_EULER_TRAILING = components.reconfigure(_EULER, timestep_spacing="trailing")
_EULER_ANCESTRAL = components.of_diffusers(
    "EulerAncestralDiscreteScheduler", **_BETAS, timestep_spacing="leading"
)
_EULER_ANCESTRAL_TRAILING = components.reconfigure(_EULER_ANCESTRAL, timestep_spacing="trailing")
# SDXL's scheduler config with another class, as the model cards of ByteDance/Hyper-SD and latent-consistency say.
_DDIM_TRAILING = components.of_diffusers(
    "DDIMScheduler", **_BETAS, clip_sample=False, set_alpha_to_one=False, timestep_spacing="trailing"
)
_LCM = components.of_diffusers("LCMScheduler", **_BETAS, set_alpha_to_one=False, timestep_spacing="leading")
_EDM = components.of_diffusers(
    "EDMDPMSolverMultistepScheduler", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0
)


def _few_steps_of_sdxl() -> tuple[FewSteps, ...]:
    """From the cards. LCM: 2 to 8 steps, guidance off or 1 to 2. Lightning and Hyper-SD: as in `_lightning` and
    hyper-sdxl-4step, with as many steps as the file's name says."""
    trailing = {"timestep_spacing": "trailing"}
    return (
        _lcm(_lcm_lora("latent-consistency/lcm-lora-sdxl", "main")),
        *(
            FewSteps(
                kind="lightning",
                lora=StoredPart(
                    repo="ByteDance/SDXL-Lightning",
                    revision=_LIGHTNING,
                    files=(f"sdxl_lightning_{steps}step_lora.safetensors",),
                ),
                steps=(steps,),
                guidance_scale=0.0,
                scheduler=SamplerEntry(class_name="EulerDiscreteScheduler", overrides=trailing),
            )
            for steps in (4, 2, 8)
        ),
        *(_hyper(f"Hyper-SDXL-{steps}steps-lora.safetensors", steps) for steps in (4, 2, 8)),
    )


def _hyper(file: str, steps: int) -> FewSteps:
    return FewSteps(
        kind="hyper",
        lora=StoredPart(repo="ByteDance/Hyper-SD", revision=_HYPER, files=(file,)),
        steps=(steps,),
        guidance_scale=0.0,
        scheduler=SamplerEntry(class_name="DDIMScheduler", overrides={"timestep_spacing": "trailing"}),
    )


def _lcm_lora(repo: str, revision: str) -> StoredPart:
    return StoredPart(repo=repo, revision=revision, files=("pytorch_lora_weights.safetensors",))


def _lcm(lora: StoredPart | str) -> FewSteps:
    return FewSteps(
        kind="lcm",
        lora=lora,
        steps=(4, 2, 3, 5, 6, 7, 8),
        guidance_scale=1.0,
        scheduler=SamplerEntry(class_name="LCMScheduler"),
    )


def _few_steps_of_sd15() -> tuple[FewSteps, ...]:
    return (
        _lcm(_lcm_lora("latent-consistency/lcm-lora-sdv1-5", "d8c735b2d28c82270200ac4499ae88b03be2b23b")),
        *(_hyper(f"Hyper-SD15-{steps}steps-lora.safetensors", steps) for steps in (4, 2, 8)),
    )


def _publish(
    entry: Entry,
    parts: dict[str, components.ComponentConfig],
    scheduler: components.ComponentConfig,
    tiny_vae: components.ComponentConfig = components.TAESD,
    title: str = "",
    labels: str = "",
    step_flop: int = 0,
    **arguments: Any,
) -> family.PublishedModel:
    lengths = {name: 77 for name in parts if name.startswith("text_encoder")}
    architecture = components.Architecture.of(entry, parts, scheduler, lengths, tiny_vae, **arguments)
    return family.PublishedModel(entry, architecture, title, labels, step_flop)


def _sdxl_base(**parts: Any) -> Hub:
    common = {
        "repo": "stabilityai/stable-diffusion-xl-base-1.0",
        "revision": "462165984030d82259a11f4367a4eed129e94a7b",
        "variants": ("fp16",),
        "tiny_vae": _TAESDXL,
        "download_bytes": _HALF_SDXL_BYTES,
    }
    return Hub.model_validate(common | parts)


def _sdxl(
    name: str,
    summary: str,
    sampler: components.ComponentConfig,
    unet: components.ComponentConfig = _SDXL_UNET,
    vae: components.ComponentConfig = _SDXL_VAE,
    counted: dict[str, Any] | None = None,
    **own: Any,
) -> family.PublishedModel:
    common = {
        "licence": _RAIL,
        "origin": _sdxl_base(),
        "pipeline": "StableDiffusionXLPipeline",
        "size_multiple": 8,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "cuda_dtype": "fp16",
    }
    entry = Entry.model_validate({"name": name, "summary": summary} | common | own)
    return _publish(
        entry,
        {
            "unet": unet,
            "vae": vae,
            "text_encoder": components.CLIP_L,
            "text_encoder_2": components.OPEN_CLIP_BIGG,
        },
        sampler,
        # Otherwise the pipeline adds a watermark if the watermarking library happens to be installed.
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
        **counted or {},
    )


def _lightning(num_steps: int) -> family.PublishedModel:
    """Return a Lightning model, by its card: Euler, trailing spacing, no guidance, the name's steps.

    The UNet, not the LoRA: its quality is better according to the card, and merged they cost the same.
    """
    unet = StoredPart(
        repo="ByteDance/SDXL-Lightning",
        revision=_LIGHTNING,
        files=(f"sdxl_lightning_{num_steps}step_unet.safetensors",),
    )
    return _sdxl(
        f"sdxl-lightning-{num_steps}step",
        f"SDXL, distilled adversarially to {num_steps} steps",
        _EULER_TRAILING,
        origin=_sdxl_base(parts={"unet": unet}),
        scheduler=SamplerEntry(
            class_name="EulerDiscreteScheduler", overrides={"timestep_spacing": "trailing"}
        ),
        num_inference_steps=num_steps,
        guidance_scale=0.0,
    )


_MODELS = (
    family.PublishedModel(
        embedded_entry(
            name="tiny-sd",
            summary="Stable Diffusion's architecture, small: coloured shapes on plain backgrounds",
            origin=Embedded(folder="tiny-sd", tiny_vae="tiny-sd-tiny-vae"),
            pipeline="StableDiffusionPipeline",
            size_multiple=32,
            num_inference_steps=25,
            guidance_scale=4.0,
            few_steps=(_lcm("tiny-sd-lcm/pytorch_lora_weights.safetensors"),),
        )
    ),
    _publish(
        Entry(
            name="sd15",
            summary="Stable Diffusion 1.5",
            licence="CreativeML OpenRAIL-M",
            origin=Hub(
                repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
                revision="451f4fe16113bff5a5d2269ed5ad43b0592e9a14",
                variants=("fp16",),
                # A classifier that blackens images: not part of the model, and 1.2 GB.
                without=("safety_checker", "feature_extractor"),
                tiny_vae=_TAESD,
                download_bytes=2_130_000_000,
            ),
            pipeline="StableDiffusionPipeline",
            height=512,
            width=512,
            size_multiple=8,
            num_inference_steps=50,
            guidance_scale=7.5,
            cuda_dtype="fp16",
            few_steps=_few_steps_of_sd15(),
        ),
        {"unet": _SD15_UNET, "vae": _SD15_VAE, "text_encoder": components.CLIP_L},
        _PNDM,
        title="SD 1.5",
        labels=r"\bsd[ -]?1\.?5\b|stable-diffusion-v1-5",
        step_flop=1_606_546_882_560,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ),
    _sdxl(
        "sdxl",
        "Stable Diffusion XL 1.0",
        _EULER,
        counted={
            "title": "SDXL",
            "labels": r"^(?:synthetic:)?(?:stabilityai/)?(?:stable[ -]diffusion[ -])?(?:sd[ -]?)?xl(?:[ -]base)?$",
            "step_flop": 13_522_472_796_160,
        },
        few_steps=_few_steps_of_sdxl(),
    ),
    # Uses its repository's scheduler: ancestral Euler with trailing spacing. The card's example has one step; the card
    # says 1 to 4.
    _sdxl(
        "sdxl-turbo",
        "SDXL, distilled adversarially to 1 to 4 steps at 512x512",
        _EULER_ANCESTRAL_TRAILING,
        components.reconfigure(_SDXL_UNET, sample_size=64),
        licence="Stability AI Non-Commercial Research Community",
        origin=Hub(
            repo="stabilityai/sdxl-turbo",
            revision="71153311d3dbb46851df1931d3ca6e939de83304",
            variants=("fp16",),
            tiny_vae=_TAESDXL,
            download_bytes=_HALF_SDXL_BYTES,
        ),
        height=512,
        width=512,
        num_inference_steps=1,
        guidance_scale=0.0,
    ),
    _lightning(2),
    _lightning(4),
    # From its card: DDIM with trailing spacing for the checkpoints of 2, 4 and 8 steps, no guidance. For four steps
    # there is no UNet, only a LoRA.
    _sdxl(
        "hyper-sdxl-4step",
        "SDXL with Hyper-SD's LoRA of 4 steps merged in",
        _DDIM_TRAILING,
        origin=_sdxl_base(
            lora=StoredPart(
                repo="ByteDance/Hyper-SD",
                revision=_HYPER,
                files=("Hyper-SDXL-4steps-lora.safetensors",),
            ),
            download_bytes=_HALF_SDXL_BYTES + 790_000_000,
        ),
        scheduler=SamplerEntry(class_name="DDIMScheduler", overrides={"timestep_spacing": "trailing"}),
        num_inference_steps=4,
        guidance_scale=0.0,
    ),
    # Guidance is an input of this UNet, not a second call. 8 is from diffusers' documentation, in the range of its
    # distillation (3 to 13); its card has 1 to 2.
    _sdxl(
        "lcm-sdxl",
        "SDXL, distilled to a latent consistency model of 2 to 8 steps",
        _LCM,
        _LCM_UNET,
        origin=_sdxl_base(
            parts={
                "unet": StoredPart(
                    repo="latent-consistency/lcm-sdxl",
                    revision="843cb4058e2bb79edc70a6d8002e1a96feddfd14",
                    files=("config.json", "diffusion_pytorch_model.fp16.safetensors"),
                )
            }
        ),
        scheduler=SamplerEntry(class_name="LCMScheduler"),
        num_inference_steps=4,
        guidance_scale=8.0,
    ),
    # Its author asks for "clip skip 2", counted from 1: the last layer but one. SDXL pipelines use that layer by
    # default, so in diffusers' count it is 0. Ancestral Euler and 25 steps come from the author too, who gives no
    # guidance; 7 is usual. The author published a single file elsewhere; this repository is the best known one in
    # diffusers' format.
    _sdxl(
        "pony",
        "Pony Diffusion V6 XL, a finetune of SDXL; likes prompts that begin with score_9, score_8_up, ...",
        _EULER_ANCESTRAL,
        licence="Fair AI Public 1.0-SD, modified",
        origin=Hub(
            repo="kitty7779/ponyDiffusionV6XL",
            revision="b0b14dd9f27190bdff916493e0bef66471f9764a",
            tiny_vae=_TAESDXL,
            download_bytes=_HALF_SDXL_BYTES,
        ),
        scheduler=SamplerEntry(class_name="EulerAncestralDiscreteScheduler"),
        num_inference_steps=25,
        guidance_scale=7.0,
        clip_skip=0,
        few_steps=_few_steps_of_sdxl(),
    ),
    # The pipeline needs the repository's scheduler (EDMDPMSolverMultistepScheduler), and the latents' mean and standard
    # deviation from its VAE's config, which SDXL's tiny VAE does not support.
    _sdxl(
        "playground",
        "Playground v2.5, SDXL's architecture trained with EDM's noise",
        _EDM,
        vae=_PLAYGROUND_VAE,
        licence="Playground v2.5 Community",
        origin=Hub(
            repo="playgroundai/playground-v2.5-1024px-aesthetic",
            revision="1e032f13f2fe6db2dc49947dbdbd196e753de573",
            variants=("fp16",),
            download_bytes=_HALF_SDXL_BYTES,
        ),
        guidance_scale=3.0,
    ),
)


# The names in github.com/Stability-AI/generative-models.
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_IN_BLOCK = re.compile(
    r"(?P<side>down_blocks\.(?P<down>\d+)|mid_block|up_blocks\.(?P<up>\d+))"
    r"\.(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<number>\d+)\.(?P<rest>.+)"
)


def _original_name(name: str, modules: Mapping[str, str], config: Any) -> str | None:
    layers_per_block = config.get("layers_per_block")
    if not isinstance(layers_per_block, int):
        return None
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return None
    kind, number, rest = match["kind"], int(match["number"]), match["rest"]
    if kind == "resnets":
        rest = _RESNET.get(rest, rest)
    each = layers_per_block + 1
    if match["down"] is not None:
        first = int(match["down"]) * each + 1
        if kind == "downsamplers":
            return f"input_blocks.{first + layers_per_block}.0.op"
        return f"input_blocks.{first + number}.{int(kind == 'attentions')}.{rest}"
    if match["up"] is not None:
        first = int(match["up"]) * each
        if kind == "upsamplers":
            has_attention = f"{match['side']}.attentions.0" in modules
            return f"output_blocks.{first + layers_per_block}.{1 + has_attention}.conv"
        return f"output_blocks.{first + number}.{int(kind == 'attentions')}.{rest}"
    return f"middle_block.{2 * number + (kind == 'attentions')}.{rest}"


_FIRST = "input_blocks.0.0.weight"
_FOUR = ((_FIRST, 1, 4),)
_VAE = "first_stage_model.*"
_SDXL_TEXT = "conditioner.embedders.1.model.positional_embedding"
_SD1_TEXT = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"
_SD2_TEXT = "cond_stage_model.model.*"
_OWN_VAE = family.FilePart("vae", "first_stage_model.")
_SDXL_PARTS = (
    _OWN_VAE,
    family.FilePart("text_encoder", "conditioner.embedders.0.transformer."),
    family.FilePart("text_encoder_2", "conditioner.embedders.1.model."),
)
_SD1_PARTS = (_OWN_VAE, family.FilePart("text_encoder", "cond_stage_model.transformer."))
_SD2_PARTS = (_OWN_VAE, family.FilePart("text_encoder", "cond_stage_model.model.", lacks_last=True))
_REST = (
    "give the file that holds the whole model, or a folder in diffusers' format with all parts ({supported})"
)


def _with_other_input(what: str, num_channels: int, *has: str) -> family.Signature:
    return family.Signature(
        f"{what}, not a text-to-image model", (_FIRST, *has), ((_FIRST, 1, num_channels),)
    )


def _whole(
    what: str, entry: str, parts: tuple[family.FilePart, ...], *has: str, tells_prediction: bool = True
) -> family.Signature:
    return family.Signature(
        what, (_FIRST, _VAE, *has), _FOUR, entry, parts=parts, tells_prediction=tells_prediction
    )


def _alone(what: str, entry: str, width: int, block: str, *has: str) -> family.Signature:
    sizes = (*_FOUR, (f"{block}.1.transformer_blocks.0.attn2.to_k.weight", 1, width))
    return family.Signature(what, (_FIRST, *has), sizes, entry, "unet", tells_prediction=True)


_FILES = family.SingleFiles(
    (
        family.Signature(
            "Stable Video Diffusion, which makes videos",
            ("input_blocks.1.0.time_stack.*",),
            advice="vivace makes single images from text; {supported}",
        ),
        _with_other_input("an inpainting model of SDXL", 9, _SDXL_TEXT),
        _with_other_input("an inpainting model", 9),
        _with_other_input("an image editing model", 8),
        _with_other_input("an upscaler", 7),
        _with_other_input("a model that starts from a depth map", 5),
        family.Signature(
            "CosXL, which predicts v over EDM's noise levels",
            (_FIRST, "edm_vpred.sigma_max"),
            advice="vivace has no sampler for it ({supported})",
        ),
        _whole("Playground v2.5", "playground", _SDXL_PARTS, _SDXL_TEXT, "edm_mean", tells_prediction=False),
        _whole("SDXL", "sdxl", _SDXL_PARTS, _SDXL_TEXT),
        _whole("SD 1.5", "sd15", _SD1_PARTS, _SD1_TEXT),
        family.Signature(
            "SDXL's refiner, which refines images of another model",
            (_FIRST, "conditioner.embedders.0.model.*"),
            advice="{supported}",
        ),
        _whole("an SD 2 model", "sd2", _SD2_PARTS, _SD2_TEXT),
        _alone("SDXL's UNet", "sdxl", 2048, "input_blocks.4", "label_emb.0.0.weight"),
        _alone("SD 1.5's UNet", "sd15", 768, "input_blocks.1"),
        *family.refuse(
            "vivace reads a UNet's own weights (model.diffusion_model.*); give the file that has them",
            ("a model with averaged weights (EMA) of its UNet alone", ("model_ema.diffusion_model*",)),
        ),
        *family.refuse(
            _REST,
            ("an SD 2 model without its VAE", (_FIRST, _SD2_TEXT)),
            ("SDXL without its VAE", (_FIRST, _SDXL_TEXT)),
            ("SD 1.5 without its VAE", (_FIRST, _SD1_TEXT)),
            ("a UNet and a VAE, and has no text encoder that vivace knows", (_FIRST, _VAE)),
            (
                "a UNet without its VAE and text encoders, of SDXL or one like it",
                (_FIRST, "label_emb.0.0.weight"),
            ),
            ("a UNet without its VAE and text encoders", (_FIRST,)),
            sizes=_FOUR,
        ),
        family.Signature(
            f"a UNet whose input ({_FIRST}) has not 4 channels, or was written with another shape", (_FIRST,)
        ),
    ),
    supported=("SD 1.5", "SDXL"),
    modules=("input_blocks.", "middle_block.", "output_blocks.", "out.", "time_embed.", "label_emb."),
    plain_prefixes=(family.UNET_PREFIX,),
)

_TURBO: dict[str, Any] = {
    "num_inference_steps": 4,
    "guidance_scale": 0.0,
    "scheduler": SamplerEntry(
        class_name="EulerAncestralDiscreteScheduler", overrides={"timestep_spacing": "trailing"}
    ),
}

STABLE_DIFFUSION = family.Family(
    name="Stable Diffusion",
    denoiser="UNet2DConditionModel",
    pipelines=(
        family.Pipeline(
            "StableDiffusionPipeline",
            tasks={
                "image": "StableDiffusionImg2ImgPipeline",
                "inpaint": "StableDiffusionInpaintPipeline",
                "control": "StableDiffusionControlNetPipeline",
            },
            rounds_steps_down=True,
        ),
        family.Pipeline(
            "StableDiffusionXLPipeline",
            tasks={
                "image": "StableDiffusionXLImg2ImgPipeline",
                "inpaint": "StableDiffusionXLInpaintPipeline",
                "control": "StableDiffusionXLControlNetPipeline",
            },
            # Playground v2.5
            own_defaults=tuple(
                family.OwnDefaults("scheduler/scheduler_config.json", "_class_name", sampler, 50, 3.0)
                for sampler in ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
            ),
            rounds_steps_down=True,
        ),
        family.Pipeline("LatentConsistencyModelPipeline"),
    ),
    files=_FILES,
    original=family.OriginalNames(of_layer=_original_name),
    lora_layers=("output_blocks", "up_blocks"),
    by_text_width={768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "SDXL"},
    # SDXL Turbo itself draws in 1 to 4 steps at 512 x 512; most of those that are made of it at 1024.
    distilled=(
        family.DistilledFile(
            "sdxl",
            "turbo",
            _TURBO | {"num_inference_steps": 1, "height": 512, "width": 512},
            named=r"sd[-_ ]?xl[-_ ]turbo",
        ),
        family.DistilledFile("sdxl", "turbo", _TURBO),
        family.DistilledFile(
            "sdxl",
            "dmd",
            {
                "num_inference_steps": 4,
                "guidance_scale": 0.0,
                "scheduler": SamplerEntry(class_name="LCMScheduler"),
            },
        ),
    ),
    models=_MODELS,
    random_weights={
        "UNet2DConditionModel": family.RandomWeights(_gains, finish=_carry_noise_through),
    },
    doubled=family.BatchDoubling(),
    controlnets=family.ControlNets("ControlNetModel", "from_unet"),
    is_transformer=False,
    cells=lambda _: 1,
    fused="unet",
)
