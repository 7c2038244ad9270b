"""NVFP4 and MXFP8 against definitions written out in float64: every number is the nearest that the format has."""

import itertools
import math

import pytest
import torch

from vivace.machinery.quantization.block_tensors import (
    from_mxfp8,
    from_nvfp4,
    tiled,
    tiled_shape,
    to_mxfp8,
    to_nvfp4,
    untiled,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""By their codes; an even code has an even mantissa."""
E4M3 = [m * 2.0**-9 for m in range(8)] + [
    (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest(number: float, numbers: list[float]) -> float:
    """The nearest number of a format, halfway the one with an even code."""
    size = abs(number)
    ranked = sorted(range(len(numbers)), key=lambda code: (abs(numbers[code] - size), code % 2))
    return math.copysign(numbers[ranked[0]], number)


def blocks(row: list[float], size: int) -> list[list[float]]:
    return [row[start : start + size] for start in range(0, len(row), size)]


def by_hand_nvfp4(rows: list[list[float]]) -> list[list[float]]:
    tensor_scale = max(abs(number) for row in rows for number in row) / (6 * 448)
    made = []
    for row in rows:
        made.append([])
        for block in blocks(row, 16):
            scale = nearest(max(max(map(abs, block)) / 6 / tensor_scale, 2.0**-9), E4M3)
            made[-1] += [
                nearest(number / (scale * tensor_scale), E2M1) * scale * tensor_scale for number in block
            ]
    return made


def by_hand_mxfp8(rows: list[list[float]]) -> list[list[float]]:
    made = []
    for row in rows:
        made.append([])
        for block in blocks(row, 32):
            largest = max(map(abs, block))
            scale = 2.0 ** next(e for e in range(-126, 128) if largest <= 448 * 2.0**e)
            made[-1] += [nearest(number / scale, E4M3) * scale for number in block]
    return made


def rows(kind: str) -> torch.Tensor:
    numbers = torch.randn(5, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    if kind == "outlier channels":
        numbers[:, 7] *= 300
        numbers[:, 50] *= 5000
    if kind == "rows of other sizes":
        numbers *= torch.tensor([1e-6, 1e-3, 1, 1e3, 1e6])[:, None]
    if kind == "halfway":
        numbers = torch.tensor(
            [[*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, -0.25, -5.0] + [6.0] * 78]
        )
        numbers = torch.cat((numbers, -numbers)) * 448
    return numbers


KINDS = ("normal", "outlier channels", "rows of other sizes", "halfway")


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_is_the_definition(kind: str) -> None:
    numbers = rows(kind)
    packed, scales, tensor_scale = to_nvfp4(numbers)
    assert packed.shape == (len(numbers), 48)
    assert (packed.dtype, scales.dtype, tensor_scale.shape) == (torch.uint8, torch.float8_e4m3fn, ())
    made = from_nvfp4(packed, scales).double() * tensor_scale.double()
    expected = torch.tensor(by_hand_nvfp4(numbers.double().tolist()), dtype=torch.float64)
    torch.testing.assert_close(made, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_is_the_definition(kind: str) -> None:
    numbers = rows(kind)
    quantised, exponents = to_mxfp8(numbers)
    assert (quantised.dtype, exponents.dtype) == (torch.float8_e4m3fn, torch.uint8)
    expected = torch.tensor(by_hand_mxfp8(numbers.double().tolist()), dtype=torch.float64)
    assert torch.equal(from_mxfp8(quantised, exponents).double(), expected)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 64)
    packed, scales, tensor_scale = to_nvfp4(zeros)
    assert torch.equal(from_nvfp4(packed, scales) * tensor_scale, zeros)
    assert torch.equal(from_mxfp8(*to_mxfp8(zeros)), zeros)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 6), (300, 12)])
def test_tiles_have_the_order_that_matmuls_read(shape: tuple[int, int]) -> None:
    """The offset of a scale as cuBLAS's documentation has it."""
    scales = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    made = tiled(scales)
    assert made.shape == tiled_shape(*shape)
    flat, tiles_across = made.flatten(), made.shape[1] // 4
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        tile = row // 128 * tiles_across + column // 4
        offset = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[offset] == scales[row, column]
    assert int(flat.long().sum()) == int(scales.long().sum()), "the rest is zeros"
    assert torch.equal(untiled(made, *shape), scales)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_matmuls_are_given_what_torchao_gives_them(kind: str) -> None:
    """torchao's tensors are multiplied on Blackwell by the same PyTorch function; nothing was run there."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    numbers = rows(kind)[:, :64].contiguous()
    packed, scales, tensor_scale = to_nvfp4(numbers)
    theirs = NVFP4Tensor.to_nvfp4(
        numbers, per_tensor_scale=per_tensor_amax_to_scale(numbers.abs().max()), is_swizzled_scales=True
    )
    assert torch.equal(tensor_scale, theirs.per_tensor_scale)
    # Below the least normal number of e4m3 theirs do not go.
    their_scales = theirs.scale.float().reshape(scales.shape)
    is_normal = their_scales > 2.0**-6
    assert torch.equal(scales.float()[is_normal], their_scales[is_normal])
    # They multiply by a reciprocal, which rounds a few numbers between two others the other way.
    usual = untiled(is_normal.to(torch.uint8), len(numbers), 4).bool().repeat_interleave(8, dim=1)
    assert (packed == theirs.qdata)[usual].float().mean() > 0.98
    exponents, elements = to_mx(
        numbers, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL, is_swizzled_scales=True
    )
    quantised, mine = to_mxfp8(numbers)
    assert torch.equal(mine.flatten(), exponents.view(torch.uint8).flatten())
    assert torch.equal(quantised.float(), elements.float())
