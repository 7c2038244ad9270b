"""Weights that are stored as codes with scales beside them, and how to decode them.

    scaled  values times one scale, one for each row, or one for each block; the last of blocks may be smaller
    nvfp4   two values of four bits (E2M1) to a byte, the first in the high half; blocks of 16 in a row have a scale in
            E4M3 (`X.weight_scale`), and all have one more in fp32 (`X.weight_scale_2`)
    mxfp8   values in E4M3; blocks of 32 in a row have a power of two (`X.weight_scale`, E8M0)

The last two are ComfyUI's (the package comfy-kitchen): rows and columns are padded to multiples of 16 or 32, and the
scales of blocks lie in tiles of 128 rows by 4 blocks, in the order that cuBLAS reads
(docs.nvidia.com/cuda/cublas, "Block scaling factors layout").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["scaled", "nvfp4", "mxfp8"]
BLOCKS: dict[str, int] = {"nvfp4": 16, "mxfp8": 32}
"""Values that share a scale; rows and columns are padded to a multiple of it."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_BLOCK = 128
"""Side of the blocks of tools whose last block may be smaller."""


@dataclass(frozen=True)
class Codes:
    """How a weight is stored: names of the tensors with its scales."""

    kind: Kind
    scale: str
    scale_of_scales: str = ""


def padded_shape(kind: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that a weight of this shape has in the file, before values are packed."""
    rows, columns = shape
    block = BLOCKS[kind]
    return _up(rows, block), _up(columns, block)


def scales_shape(kind: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a padded weight's blocks."""
    return _up(rows, _TILE_ROWS), _up(columns // BLOCKS[kind], _TILE_BLOCKS)


def block_length(length: int, num_scales: int) -> int:
    """Return how many values along a dimension share a scale; 0 where that cannot be told.

    A number for all, one for each, or one for each power of two. A length that those do not divide has blocks of 128,
    the last of them smaller: of 192 values and two scales, the second is of 64.
    """
    if num_scales < 1:
        return 0
    block = length // num_scales
    if length % num_scales == 0 and (num_scales == 1 or block & (block - 1) == 0):
        return block
    return _BLOCK if num_scales == -(-length // _BLOCK) else 0


def multiplied(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the product of a weight and its scale: one number, one for each row, or one for each block."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if scale.dim() == 1:
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    for axis, length in enumerate(weight.shape):
        block = block_length(length, scale.shape[axis])
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, length)
    return weight * scale


def from_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_of_scales: torch.Tensor) -> torch.Tensor:
    """Return the padded weight in fp32."""
    import torch

    codes = packed.view(torch.uint8)
    halves = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2).long()
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])[halves]
    rows, columns = values.shape
    scales = _in_rows(scale.view(torch.float8_e4m3fn).float(), rows, columns // BLOCKS["nvfp4"])
    blocks = values.reshape(rows, -1, BLOCKS["nvfp4"])
    return (blocks * (scales * scale_of_scales.float().reshape(())).unsqueeze(-1)).reshape(rows, columns)


def from_mxfp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the padded weight in fp32."""
    import torch

    rows, columns = weight.shape
    exponents = _in_rows(scale.view(torch.uint8), rows, columns // BLOCKS["mxfp8"]).int()
    # ComfyUI writes 0 for a block of zeros.
    scales = torch.where(exponents == 0, 0.0, torch.exp2((exponents - 127).float()))
    blocks = weight.float().reshape(rows, -1, BLOCKS["mxfp8"])
    return (blocks * scales.unsqueeze(-1)).reshape(rows, columns)


def _in_rows(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales in rows: a tile's four groups of 32 rows lie beside each other."""
    tiles = tiled.reshape(-1, _up(columns, _TILE_BLOCKS) // _TILE_BLOCKS, 32, 4, _TILE_BLOCKS)
    by_row = tiles.permute(0, 3, 2, 1, 4).reshape(_up(rows, _TILE_ROWS), -1)
    return by_row[:rows, :columns]


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
