"""Qwen-Image-Edit's pipeline, narrow and with random weights: its two calls a step, and the image beside the latents.

Its prompts are embeddings: a text encoder that sees the image needs a tokenizer that is not on this machine.
"""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vivace
from vivace.models.sources import FOLDER

STEPS = 8


@functools.cache
def parts() -> tuple[Any, Any]:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    return transformer.eval(), vae.eval()


def draw(recipe: str) -> tuple[np.ndarray, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline

    torch.set_num_threads(1)
    transformer, vae = copy.deepcopy(parts())
    pipe = QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        processor=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    session = vivace.apply(pipe, recipe)
    prompt = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 7, dtype=torch.long)
    image = session(
        image=Image.open(FOLDER / "00.png").convert("RGB"),
        prompt_embeds=prompt,
        prompt_embeds_mask=mask,
        negative_prompt_embeds=-prompt,
        negative_prompt_embeds_mask=mask,
        true_cfg_scale=4.0,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        height=64,
        width=64,
        output_type="np",
    )
    return np.asarray(image.images), session.evidence()


def test_caches_and_cutoffs_count_both_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

    # The pipeline scales every image to a megapixel, which takes a CPU a minute.
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    plain, _ = draw("baseline")
    cached, evidence = draw("taylorseer(hits=0.5)")
    assert evidence["cache_calls"] == 2 * STEPS
    both, evidence = draw("taylorseer(hits=0.5)+cfg_cutoff(0.5)")
    assert evidence["cache_calls"] == STEPS + STEPS // 2
    assert (evidence["guided_steps"], evidence["unguided_steps"]) == (STEPS // 2, STEPS // 2)
    for picture in (cached, both):
        assert picture.shape == (1, 64, 64, 3)
        assert 0 < np.abs(picture - plain).mean() < 0.2
