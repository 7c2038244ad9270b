"""Which divisions of a convolution a GPU has the shared memory for."""

import pytest
import torch

from vivace.machinery.kernels import reference
from vivace.machinery.kernels.convolution_tiles import HOPPER, BlockLimits, Tiles, candidates, choose

RTX_50 = BlockLimits(101_376, (12, 0))
RTX_40 = BlockLimits(101_376, (8, 9))
BOUNDLESS = BlockLimits(1 << 40, (9, 0))
COMPILED = {
    (12, 0): {
        (128, 64, 0): 73_752,
        (128, 128, 32): 110_680,
        (128, 128, 128): 98_352,
        (256, 128, 32): 106_544,
    },
    (9, 0): {
        (128, 64, 0): 98_336,
        (128, 128, 32): 147_520,
        (128, 128, 128): 147_512,
        (256, 128, 32): 159_800,
    },
}
"""Bytes of shared memory of tiles that Triton 3.6 compiled for these chips, by rows and output channels."""


ON_ADA = {
    (128, 64, 0): 32_768,
    (128, 128, 0): 32_768,
    (128, 128, 32): 65_536,
    (128, 128, 128): 65_536,
    (256, 64, 0): 36_864,
    (256, 128, 0): 65_536,
    (256, 128, 32): 65_536,
}
"""The same for Ada, the most of programs with steps over 64 and 128 bytes and of those that share a sum."""


def layers(dtype: torch.dtype) -> list[tuple[reference.PaddedImages, torch.Tensor]]:
    """Convolutions of the sizes in SD 1.5 and SDXL, without values."""
    made = []
    for side, inputs, outputs in (
        (64, 320, 320),
        (128, 640, 320),
        (32, 1280, 640),
        (16, 2560, 1280),
        (8, 48, 96),
    ):
        for planes in (9, 16):
            rows = torch.empty(2 * (side + 1) ** 2, inputs, dtype=dtype, device="meta")
            weight = torch.empty(planes, outputs, inputs, dtype=dtype, device="meta")
            made.append((reference.PaddedImages(rows, 2, side, side, None), weight))
    return made


@pytest.mark.parametrize("capability", COMPILED)
def test_shared_memory_is_what_the_compiler_wants(capability: tuple[int, int]) -> None:
    for size, num_bytes in COMPILED[capability].items():
        predicted = Tiles(*size, 128, 1).shared_memory(1, capability)
        assert num_bytes <= predicted <= num_bytes + 128
        assert predicted == Tiles(*size, 64, 3).shared_memory(2, capability)


def test_every_tile_fits_an_rtx_40() -> None:
    for size, num_bytes in ON_ADA.items():
        for block in (64, 128):
            tiles = Tiles(*size, block, 1)
            assert num_bytes <= tiles.shared_memory(1, (8, 9)) <= RTX_40.shared_memory
    for x, weight in layers(torch.float8_e4m3fn):
        assert candidates(weight, RTX_40) == candidates(weight, BOUNDLESS)
        assert choose(x, weight, RTX_40) == choose(x, weight, HOPPER)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_no_tile_exceeds_an_rtx_50(dtype: torch.dtype) -> None:
    for x, weight in layers(dtype):
        assert 0 < len(candidates(weight, RTX_50)) < len(candidates(weight, BOUNDLESS))
        tiles = choose(x, weight, RTX_50)
        assert tiles.shared_memory(dtype.itemsize, (12, 0)) <= 101_376
        assert tiles.block * dtype.itemsize < 128 or (tiles.main, tiles.extra) != (128, 32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_hopper_chooses_among_all(dtype: torch.dtype) -> None:
    for x, weight in layers(dtype):
        assert candidates(weight, HOPPER) == candidates(weight, BOUNDLESS)
        assert choose(x, weight, HOPPER) == choose(x, weight, BOUNDLESS) == choose(x, weight)
