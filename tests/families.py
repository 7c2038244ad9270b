"""One small pipeline of each family, whole: real classes, random weights, prompts in words. For tests of recipes."""

from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import T5Config, T5EncoderModel

import vivace
from tests import shrunken
from vivace.models import find_model, load_pipeline

FAMILIES = ("sd", "sdxl", "flux")


def build(family: str) -> Any:
    """A pipeline on the CPU in fp32. `sd` is the embedded tiny-sd, the others are random but always the same."""
    if family == "sd":
        return load_pipeline(find_model("tiny-sd"), "cpu")
    pipe = shrunken.sdxl() if family == "sdxl" else flux()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux() -> FluxPipeline:
    torch.manual_seed(0)
    words = shrunken.tokenizer()
    text_encoder = shrunken.text_encoder()
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(words),
            d_model=64,
            d_kv=32,
            num_heads=2,
            d_ff=64,
            num_layers=2,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        force_upcast=False,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return FluxPipeline(scheduler, vae, text_encoder, words, t5, words, transformer)


def session(family: str, recipe: str = "baseline") -> Any:
    return vivace.apply(build(family), recipe)


def draw(session: Any, prompt: Any = "a red circle", seed: int = 0, **call: Any) -> np.ndarray:
    """Pictures (n, height, width, 3) in [0, 1]; 64 px and three steps unless the call says else."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "np"} | call
    count = 1 if isinstance(prompt, str) or prompt is None else len(prompt)
    generators = [torch.Generator().manual_seed(seed + k) for k in range(count)]
    result = session(prompt, generator=generators if count > 1 else generators[0], **told)
    return np.asarray(result.images)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)
