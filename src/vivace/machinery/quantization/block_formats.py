"""The number formats of Blackwell's tensor cores whose scales are per block: NVFP4 and MXFP8, in plain PyTorch.

NVFP4: numbers of four bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), a scale in e4m3 per 16 of a row, and
one in fp32 for the tensor. MXFP8: numbers in e4m3, a power of two (e8m0) per 32 of a row.

The same operations round on a CPU and on a GPU, so a CPU computes what the GPU would multiply. Matmuls read scales in
an order of their own, tiles of 128 rows by 4 blocks, whose places are padded with zeros (`tiled`).
Source: NVIDIA, cuBLAS, "1D Block Scaling for FP8 and FP4"; Rouhani et al., Microscaling Data Formats, arXiv 2310.10537.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_E4M3_LEAST = 2.0**-9
_LEAST_SCALE = 1e-30
"""Scale of a tensor of zeros, such as SDXL's empty negative prompt, so that nothing is divided by zero."""
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_E8M0_BIAS = 127


def to_nvfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows to NVFP4.

    Args:
        rows: (rows, columns), floating point; columns divisible by 16.

    Returns:
        Two numbers to a byte, the first in the low four bits: (rows, columns / 2), uint8. Scales per block, as
        `tiled` has them, e4m3. The tensor's scale, fp32, without dimensions.
    """
    import torch

    number, columns = rows.shape
    blocks = rows.float().reshape(number, -1, NVFP4_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    tensor_scale = (largest.amax() / (_E2M1_MAX * _E4M3_MAX)).clamp(min=_LEAST_SCALE)
    exact = largest / _E2M1_MAX / tensor_scale
    scales = exact.clamp(_E4M3_LEAST, _E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _e2m1_codes(blocks / (scales.float() * tensor_scale)).reshape(number, columns)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed, tiled(scales.squeeze(-1)), tensor_scale


def from_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers times their blocks' scales, exact in fp32, without the tensor's scale.

    Args:
        packed, scales: as `to_nvfp4` returns them.
    """
    import torch

    rows, half = packed.shape
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(rows, -1, NVFP4_BLOCK)
    per_block = untiled(scales, rows, 2 * half // NVFP4_BLOCK).float()
    return (_e2m1_numbers(codes) * per_block[..., None]).reshape(rows, -1)


def to_mxfp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to MXFP8.

    A block's scale is the least power of two with which its largest number does not exceed e4m3's.

    Args:
        rows: (rows, columns), floating point; columns divisible by 32.

    Returns:
        The numbers (rows, columns), e4m3. The exponents of the scales, plus 127, as `tiled` has them, uint8: the bytes
        of e8m0, which safetensors does not know.
    """
    import torch

    number, columns = rows.shape
    blocks = rows.float().reshape(number, -1, MXFP8_BLOCK)
    bits = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    # 448 is 1.75 * 2**8; what is larger than 1.75 times its own power of two needs one power more.
    exponents = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = exponents.clamp(min=1)
    scaled = (blocks * _powers(2 * _E8M0_BIAS - exponents)).clamp(-_E4M3_MAX, _E4M3_MAX)
    numbers = scaled.to(torch.float8_e4m3fn).reshape(number, columns)
    return numbers, tiled(exponents.squeeze(-1).to(torch.uint8))


def from_mxfp8(numbers: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `to_mxfp8`'s result, exact in fp32."""
    rows, columns = numbers.shape
    scales = _powers(untiled(exponents, rows, columns // MXFP8_BLOCK).int())
    blocks = numbers.float().reshape(rows, -1, MXFP8_BLOCK)
    return (blocks * scales[..., None]).reshape(rows, columns)


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Return the shape of `tiled` scales."""
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-blocks // _TILE_BLOCKS) * _TILE_BLOCKS


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales (rows, blocks) in the order in which matmuls read them.

    A tile is 512 bytes: of its rows 0, 32, 64 and 96 the four blocks each, then of rows 1, 33, 65 and 97.
    """
    import torch

    shape = tiled_shape(*scales.shape)
    padding = (0, shape[1] - scales.shape[1], 0, shape[0] - scales.shape[0])
    # As bytes: not every device pads fp8.
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = padded.reshape(-1, 4, 32, shape[1] // _TILE_BLOCKS, _TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(shape).view(scales.dtype)


def untiled(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return `tiled` scales as (rows, blocks)."""
    import torch

    tiles = scales.view(torch.uint8).reshape(-1, scales.shape[1] // _TILE_BLOCKS, 32, 4, _TILE_BLOCKS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)
    return padded[:rows, :blocks].contiguous().view(scales.dtype)


def _e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of e2m1, halfway to the even code, larger ones to 6; return codes, uint8.

    Below 2 the numbers are 0.5 apart, then 1 up to 4, then 2.
    """
    import torch

    sizes = numbers.abs().clamp(max=_E2M1_MAX)
    upper = torch.where(sizes < 4, sizes.round() + 2, (sizes / 2).round() + 4)
    codes = torch.where(sizes < 2, (sizes * 2).round(), upper).to(torch.uint8)
    return codes | (numbers < 0).to(torch.uint8) << 3


def _e2m1_numbers(codes: torch.Tensor) -> torch.Tensor:
    import torch

    steps = (codes & 7).float()
    sizes = torch.where(steps < 4, steps / 2, torch.where(steps < 6, steps - 2, 2 * steps - 8))
    return torch.where(codes > 7, -sizes, sizes)


def _powers(biased: torch.Tensor) -> torch.Tensor:
    """Return 2 to the powers of int32 exponents plus 127, of 1 to 254."""
    import torch

    return (biased << 23).view(torch.float32)
