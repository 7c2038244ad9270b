"""Krea 2 fused, on a CUDA device. `python -m pytest -m gpu tests/gpu/test_fused_krea2_cuda.py`."""

from typing import Any

import pytest
import torch
from diffusers import Krea2Transformer2DModel

from tests import fused_kernels as kernels
from tests.gpu.test_fused_cuda import target, too_far
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

pytestmark = pytest.mark.gpu
SHAPES = [((37,), 32, 32), ((512,), 32, 32), ((37, 37), 16, 24), ((23, 77), 33, 47)]
"""Words of each text, and height and width in tokens. Texts of two lengths keep a mask."""
_LENGTH = 512


def krea2() -> Any:
    """Two blocks, and norms and tables that are no zeros."""
    with torch.device("cuda"):
        made = Krea2Transformer2DModel(num_layers=2)
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        fill(made, generator)
        for name, parameter in made.named_parameters():
            if "norm" in name or "table" in name:
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter += 0.2 * noise
    for name, parameter in made.named_parameters():
        if "norm" not in name:  # diffusers loads norms in fp32
            parameter.data = parameter.data.bfloat16()
    return made.eval().requires_grad_(False)


def inputs_of_krea2(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    batch, places = len(words), torch.arange(_LENGTH, device="cuda")
    mask = torch.stack([(places < number - 5) | (places >= _LENGTH - 5) for number in words])
    positions = torch.zeros(_LENGTH + height * width, 3, device="cuda")
    positions[_LENGTH:, 1] = torch.arange(height, device="cuda").repeat_interleave(width)
    positions[_LENGTH:, 2] = torch.arange(width, device="cuda").repeat(height)
    return {
        "hidden_states": random(batch, height * width, 64),
        "encoder_hidden_states": random(batch, _LENGTH, 12, 2560),
        "timestep": torch.full((batch,), 0.75, device="cuda").bfloat16(),
        "position_ids": positions,
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


@torch.no_grad()
def test_the_transformer_against_diffusers_and_torchao() -> None:
    assert too_far(krea2, inputs_of_krea2, SHAPES, of_bf16=0.015, of_fp8=0.09) == []


@torch.no_grad()
def test_same_bits_from_the_same_inputs() -> None:
    made = krea2()
    its = target(made)
    fastest = Fused(precision="fp8", attention="fp8")
    (fastest if fastest.unsupported(its) is None else Fused(precision="fp8")).apply(its)
    arguments = inputs_of_krea2((37,), 32, 32)
    expected = made(**arguments)[0].clone()
    assert all(torch.equal(made(**arguments)[0], expected) for _ in range(200))


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("quantize", [False, True])
def test_its_kernels_against_float64(kind: str, quantize: bool) -> None:
    for channels in (200, 6144):
        kernels.check_sigmoid_gate(kind, 5, channels, quantize, "cuda")
        for tokens in kernels.LAYOUTS:
            kernels.check_rms_norm_modulated(kind, tokens, channels, quantize, "cuda")
