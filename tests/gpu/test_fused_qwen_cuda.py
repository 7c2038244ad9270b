"""Qwen-Image fused, on a CUDA device. `python -m pytest -m gpu tests/gpu/test_fused_qwen_cuda.py`."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Transformer2DModel, QwenImageTransformer2DModel

import vivace
from tests import flow_models
from tests.gpu.test_fused_cuda import too_far
from tests.unit.fused import test_qwen_image21 as of_qwen_image21
from vivace.models.synthetic import fill

pytestmark = pytest.mark.gpu


def qwen_image(**config: Any) -> Any:
    """Two blocks of Qwen-Image."""
    with torch.device("cuda"):
        made = QwenImageTransformer2DModel(num_layers=2, out_channels=16, **config)
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs_of_qwen_image(words: tuple[int, ...], *shapes: tuple[int, int]) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    batch, longest = len(words), max(words)
    mask = torch.arange(longest)[None] < torch.tensor(words)[:, None]
    return {
        "hidden_states": random(batch, sum(height * width for height, width in shapes), 64),
        "encoder_hidden_states": random(batch, longest, 3584),
        "encoder_hidden_states_mask": None if mask.all() else mask.cuda(),
        "timestep": torch.full((batch,), 0.75, device="cuda").bfloat16(),
        "img_shapes": [[(1, *shape) for shape in shapes]] * batch,
        "return_dict": False,
    }


@pytest.mark.parametrize("zero", [False, True])
@torch.no_grad()
def test_qwen_images_transformer_against_diffusers_and_torchao(zero: bool) -> None:
    """Texts of odd lengths, of two lengths, and images to be edited."""
    shapes = [((64,), (32, 32)), ((23,), (32, 32)), ((23,), (32, 48), (33, 47))]
    shapes += [] if zero else [((23, 77), (33, 47)), ((64, 64), (16, 24))]
    made = functools.partial(qwen_image, zero_cond_t=zero)
    assert too_far(made, inputs_of_qwen_image, shapes, of_bf16=0.015, of_fp8=0.07) == []


def qwen_image21() -> Any:
    """Two blocks of Qwen-Image 2.1, whose frequencies stay in fp32, as a loaded one's."""
    with torch.device("cuda"):
        made = QwenImage21Transformer2DModel(num_layers=2)
    frequencies = made.time_text_embed.time_proj.freqs
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    made.time_text_embed.time_proj.freqs = frequencies
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs_of_qwen_image21(*shapes: Any) -> dict[str, Any]:
    return of_qwen_image21.inputs(*shapes, channels=(64, 4096), like=torch.zeros(0, device="cuda").bfloat16())


@torch.no_grad()
def test_qwen_image_21s_transformer_against_diffusers_and_torchao() -> None:
    """Both kinds of steps, side by side as one tensor."""

    def of(made: Any) -> Any:
        return lambda **arguments: (torch.cat(of_qwen_image21.steps(made, arguments)),)

    shapes = [((23,), (32, 32)), ((23,), (34, 46), (32, 48)), ((23, 77), (32, 32))]
    assert too_far(qwen_image21, inputs_of_qwen_image21, shapes, of, of_bf16=0.015, of_fp8=0.08) == []


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)"])
def test_a_pipeline_of_qwen_image_21_in_a_graph(recipe: str) -> None:
    """The first step, which reads back from the GPU, is not part of it; prompts of one length share one."""
    plain, graphs = (
        vivace.apply(flow_models.pipeline("qwen-image-2.1").to("cuda"), f"bf16+{text}")
        for text in (recipe, f"{recipe}+cuda_graph")
    )
    for prompt in ("a red star", "a star on a field of white flowers", "a red star"):
        assert np.array_equal(flow_models.draw(graphs, prompt), flow_models.draw(plain, prompt)), prompt
    assert graphs.evidence()["cuda_graphs_recorded"] == 2
