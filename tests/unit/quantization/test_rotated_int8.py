"""int8 with rotated inputs: less error where a channel is large, the kernel's numbers, and what is refused."""

import pytest
import torch

from tests.targets import CPU
from tests.unit.recommendation.tables import ask, evidence, table
from vivace.machinery.kernels.reference import rotate
from vivace.machinery.quantization import SCHEMES
from vivace.machinery.quantization.rotated_int8 import block_of, quantise_rows
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.recipes.resolve import resolve

RECIPE = "quantize(int8_dynamic, rotation=hadamard)"
FOUR = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double() / 2


def quantised(layer: torch.nn.Linear, rotation: str) -> torch.nn.Module:
    made = torch.nn.Linear(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    settings = SchemeSettings(CPU, rotation=rotation)
    return SCHEMES["torchao", "int8_dynamic"].convert(made.requires_grad_(False), settings)


def test_the_rotation_is_a_product_with_convrot_s_matrix() -> None:
    matrix = FOUR
    for _ in range(3):
        matrix = torch.kron(matrix, FOUR)
    x = torch.randn(3, 512, dtype=torch.float64)
    expected = torch.cat([block @ matrix for block in x.split(256, dim=1)], dim=1)
    torch.testing.assert_close(rotate(x, 256), expected)
    torch.testing.assert_close(rotate(rotate(x, 64), 64), x)


@pytest.mark.parametrize("channels", [512, 320])
def test_outliers_cost_less_with_rotation(channels: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(channels, 96).requires_grad_(False)
    inputs = torch.randn(2, 20, channels)
    inputs[..., 7] *= 60
    expected = layer(inputs)
    plain, rotated = (
        float((quantised(layer, how)(inputs) - expected).norm() / expected.norm())
        for how in ("none", "hadamard")
    )
    assert rotated < plain / 2
    assert rotated < 0.02


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_multiplies_rotated_int8(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48).requires_grad_(False)
    made = quantised(layer, "hadamard").to(torch.bfloat16)
    called = torch.compile(made, backend="eager", fullgraph=True) if compiled else made
    inputs = torch.randn(3, 8, 64)
    output = called(inputs.bfloat16())
    assert (output.dtype, output.shape) == (torch.bfloat16, (3, 8, 48))
    torch.testing.assert_close(output.float(), layer(inputs), rtol=0.03, atol=0.03)
    torch.testing.assert_close(made.weight.dequantize().float(), layer.weight, rtol=0.02, atol=0.002)


def test_a_row_of_zeros_stays_zeros() -> None:
    codes, scale = quantise_rows(torch.zeros(2, 64))
    assert not codes.any()
    assert bool((scale > 0).all())


@pytest.mark.parametrize(("channels", "block"), [(3072, 256), (640, 64), (320, 64), (96, 0)])
def test_the_largest_block_that_divides(channels: int, block: int) -> None:
    assert block_of(channels) == block
    reason = SCHEMES["torchao", "int8_dynamic"].skips(
        torch.nn.Linear(channels, 64), "proj", SchemeSettings(CPU, rotation="hadamard")
    )
    assert (reason is None) == bool(block)
    assert block or "not a multiple of 64" in str(reason)


def test_it_is_recommended_only_where_it_is_proven() -> None:
    recipe = resolve(RECIPE)
    assert "rotation=hadamard" in recipe.text
    assert not recipe.same_picture
    answer = ask(table(evidence(RECIPE, 1.5), gpu="NVIDIA A100"), gpu="A100")
    assert answer.chosen is None or "rotation" not in answer.chosen.recipe
    assert [left.kind for left in answer.left_out if "rotation" in left.recipe] == ["unproven"]
