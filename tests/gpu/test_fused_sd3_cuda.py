"""Stable Diffusion 3.5 fused, on a CUDA device. `python -m pytest -m gpu tests/gpu/test_fused_sd3_cuda.py`."""

import functools
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel

from tests.gpu.test_fused_cuda import error, target, too_far
from tests.narrow import network
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

pytestmark = pytest.mark.gpu
SHAPES = [(1, 333, 32, 32), (2, 333, 32, 32), (2, 154, 33, 47), (1, 77, 17, 23)]
"""Batch, text tokens, height and width in tokens."""
DUAL = {"large": (network("sd35-large"), []), "medium": (network("sd35-medium"), [0])}
"""The published configuration, and which of two blocks have a second attention."""


def sd3(kind: str) -> Any:
    """Two blocks, the last of which ends the text."""
    published, dual = DUAL[kind]
    with torch.device("cuda"):
        made = SD3Transformer2DModel(
            **published.config | {"num_layers": 2, "dual_attention_layers": dual, "pos_embed_max_size": 64}
        )
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        fill(made, torch.Generator("cuda").manual_seed(1))
    return made


def inputs_of_sd3(batch: int, text: int, height: int, width: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    return {
        "hidden_states": random(batch, 16, 2 * height, 2 * width),
        "encoder_hidden_states": random(batch, text, 4096),
        "pooled_projections": random(batch, 2048),
        "timestep": torch.full((batch,), 700.0, device="cuda"),
        "return_dict": False,
    }


@pytest.mark.parametrize("kind", DUAL)
@torch.no_grad()
def test_the_transformer_against_diffusers_and_torchao(kind: str) -> None:
    made = functools.partial(sd3, kind)
    assert too_far(made, inputs_of_sd3, SHAPES, of_bf16=0.015, of_fp8=0.07) == []


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@torch.no_grad()
def test_modulations_are_hoisted_and_a_graph_repeats_its_bits(precision: Any) -> None:
    """Guidance doubles the batch: two rows of the table for each of 40 timesteps."""
    made, plain = sd3("medium"), sd3("medium")
    timesteps = torch.linspace(1000, 10, 40).tolist()
    its = target(made, timesteps)
    effect = Fused(precision=precision).apply(its)
    arguments = inputs_of_sd3(2, 333, 32, 32)
    for time in its.pipe.scheduler.timesteps[::13]:
        arguments["timestep"] = time.expand(2)
        assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.07
    assert effect.evidence()["denoiser.modulations_hoisted"] == 80
    assert effect.evidence()["denoiser.modulations_computed_in_the_loop"] == 0
    arguments["timestep"] = its.pipe.scheduler.timesteps[3].expand(2).clone()
    expected = made(**arguments)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = made(**arguments)
    for _ in range(200):
        graph.replay()
        assert torch.equal(captured, expected)
