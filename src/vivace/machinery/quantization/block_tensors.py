"""Weights in NVFP4 and MXFP8 as tensors whose Linear quantises its inputs in the same format and multiplies both.

On a GPU cuBLASLt multiplies them (`torch._scaled_mm`). Elsewhere the products of the same rounded numbers are summed in
fp32, which differs from the GPU in the order of the sums only. Where a matmul leaves NVFP4's two fp32 scales to be
applied behind it, as cuBLASLt's in PyTorch does, that order is kept: rounded, scaled with the bias in fp32, rounded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


_MORE = 8
"""Extra directions that are computed, so that the last kept one is accurate as well."""
_PASSES = 4
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_E4M3_LEAST = 2.0**-9
_LEAST_SCALE = 1e-30
"""Scale of a tensor of zeros, such as SDXL's empty negative prompt, so that nothing is divided by zero."""
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_E8M0_BIAS = 127


@functools.cache
def _block_tensor() -> Any:
    import torch
    from torchao.utils import TorchAOBaseTensor

    class BlockTensor(TorchAOBaseTensor):  # type: ignore[misc]
        tensor_attribute_names: ClassVar[list[str]] = ["dtype"]

        def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
            weight = self.numbers()
            if self.up is not None:
                weight = weight + self.up.float() @ self.down.float()
            return weight.to(output_dtype or self.dtype)

    def linear(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        inputs, weight = args[:2]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = weight.multiplied(rows, bias)
        if weight.up is not None:
            output += (
                torch.nn.functional.linear(rows, weight.down.to(rows.dtype)) @ weight.up.to(rows.dtype).T
            )
        shaped: torch.Tensor = output.reshape(*inputs.shape[:-1], weight.shape[0])
        return shaped

    BlockTensor.implements_torch_function(torch.nn.functional.linear)(linear)
    BlockTensor.implements(torch.ops.aten.linear.default)(linear)
    return BlockTensor


@functools.cache
def nvfp4_tensor() -> Any:
    """Return the class of an NVFP4 weight (out_features, in_features), a tensor with its dequantised dtype.

    packed, scale, tensor_scale: as `to_nvfp4` returns them.
    up, down: the low-rank branch, in 16 bits; None without one.
    """
    import torch

    class NvFp4Tensor(_block_tensor()):  # type: ignore[misc]
        tensor_data_names: ClassVar[list[str]] = ["packed", "scale", "tensor_scale"]
        optional_tensor_data_names: ClassVar[list[str]] = ["up", "down"]

        def __new__(
            cls, packed: Any, scale: Any, tensor_scale: Any, dtype: Any, up: Any = None, down: Any = None
        ) -> Any:
            shape = (packed.shape[0], 2 * packed.shape[1])
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=packed.device, requires_grad=False
            )

        def __init__(
            self, packed: Any, scale: Any, tensor_scale: Any, dtype: Any, up: Any = None, down: Any = None
        ) -> None:
            super().__init__()
            self.packed, self.scale, self.tensor_scale = packed, scale, tensor_scale
            self.up, self.down = up, down

        def numbers(self) -> torch.Tensor:
            return from_nvfp4(self.packed, self.scale) * self.tensor_scale

        def multiplied(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            """Return rows times the quantised weight plus the bias, without the low-rank branch."""
            packed, scale, tensor_scale = to_nvfp4(rows)
            if rows.device.type == "cpu":
                products = from_nvfp4(packed, scale) @ from_nvfp4(self.packed, self.scale).T
                # fp16 would overflow before the scales are applied; the GPU's is refused for that.
                sums = products if rows.dtype == torch.float16 else products.to(rows.dtype)
            else:
                two = torch.float4_e2m1fn_x2
                sums = torch._scaled_mm(
                    packed.view(two), self.packed.view(two).t(), scale, self.scale, out_dtype=rows.dtype
                )
            output = sums.float() * (tensor_scale * self.tensor_scale)
            return (output if bias is None else output + bias.float()).to(rows.dtype)

    NvFp4Tensor.__qualname__ = "NvFp4Tensor"
    return NvFp4Tensor


@functools.cache
def mxfp8_tensor() -> Any:
    """Return the same in MXFP8. numbers_e4m3, exponents: as `to_mxfp8` returns them."""
    import torch

    class MxFp8Tensor(_block_tensor()):  # type: ignore[misc]
        tensor_data_names: ClassVar[list[str]] = ["qdata", "exponents"]
        optional_tensor_data_names: ClassVar[list[str]] = ["up", "down"]

        def __new__(cls, qdata: Any, exponents: Any, dtype: Any, up: Any = None, down: Any = None) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, qdata.shape, dtype=dtype, device=qdata.device, requires_grad=False
            )

        def __init__(self, qdata: Any, exponents: Any, dtype: Any, up: Any = None, down: Any = None) -> None:
            super().__init__()
            self.qdata, self.exponents, self.up, self.down = qdata, exponents, up, down

        def numbers(self) -> torch.Tensor:
            return from_mxfp8(self.qdata, self.exponents)

        def multiplied(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            """Return rows times the quantised weight plus the bias, without the low-rank branch."""
            numbers, exponents = to_mxfp8(rows)
            if rows.device.type == "cpu":
                sums = from_mxfp8(numbers, exponents) @ self.numbers().T
                return (sums if bias is None else sums + bias.float()).to(rows.dtype)
            power = torch.float8_e8m0fnu
            scales = (exponents.view(power), self.exponents.view(power))
            output: torch.Tensor = torch._scaled_mm(
                numbers, self.qdata.t(), *scales, bias=bias, out_dtype=rows.dtype
            )
            return output

    MxFp8Tensor.__qualname__ = "MxFp8Tensor"
    return MxFp8Tensor


def __getattr__(name: str) -> Any:
    if name == "NvFp4Tensor":
        return nvfp4_tensor()
    if name == "MxFp8Tensor":
        return mxfp8_tensor()
    raise AttributeError(name)


def nvfp4_weight(weight: torch.Tensor, rank: int = 0) -> Any:
    """Return a weight (out_features, in_features) as an NvFp4Tensor, with a low-rank branch if there is a rank."""
    up, down, rest = _divided(weight, rank)
    packed, scale, tensor_scale = to_nvfp4(rest)
    return nvfp4_tensor()(packed, scale, tensor_scale, dtype=weight.dtype, up=up, down=down)


def mxfp8_weight(weight: torch.Tensor, rank: int = 0) -> Any:
    up, down, rest = _divided(weight, rank)
    qdata, exponents = to_mxfp8(rest)
    return mxfp8_tensor()(qdata, exponents, dtype=weight.dtype, up=up, down=down)


def _divided(
    weight: torch.Tensor, rank: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    if not rank:
        return None, None, weight.detach()
    if weight.is_meta:  # has a shape and no directions
        rows, columns = weight.shape
        return weight.new_empty((rows, rank)), weight.new_empty((rank, columns)), weight.detach()
    up, down = branch(weight, rank)
    return up, down, rest_of(weight, up, down)


# The largest singular directions hold a weight's outliers. Without them the rest has smaller blocks' maxima, so that
# four bits round it less. This is SVDQuant's low-rank branch. Its smoothing, which moves outliers of the inputs into
# the weights, is left out: it needs calibration and one more pass over the inputs, and on the embedded models takes off
# 10 to 16 % of the error that the branch leaves (`benchmarks/block_formats.py`). Source: Li et al., SVDQuant, arXiv
# 2411.05007.
def branch(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight's `rank` largest singular directions, up (out_features, rank) and down (rank, in_features).

    They are found by subspace iteration from seeded noise, so that the same weight gives the same matrices; each has
    the square roots of the singular values. Source: Halko, Martinsson and Tropp, arXiv 0909.4061.
    """
    import torch

    matrix = weight.detach().float()
    width = min(rank + _MORE, *matrix.shape)
    noise = torch.randn(matrix.shape[1], width, generator=torch.Generator("cpu").manual_seed(0))
    basis = torch.linalg.qr(matrix @ noise.to(matrix.device))[0]
    for _ in range(_PASSES):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    left, sizes, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    roots = sizes[:rank].sqrt()
    up, down = (basis @ left[:, :rank]) * roots, roots[:, None] * right[:rank]
    return up.to(weight.dtype).contiguous(), down.to(weight.dtype).contiguous()


def rest_of(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rest: torch.Tensor = weight.detach().float() - up.float() @ down.float()
    return rest


# NVFP4: numbers of four bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), a scale in e4m3 per 16 of a row,
# and one in fp32 for the tensor. MXFP8: numbers in e4m3, a power of two (e8m0) per 32 of a row.
#
# The same operations round on a CPU and on a GPU, so a CPU computes what the GPU would multiply. Matmuls read scales in
# an order of their own, tiles of 128 rows by 4 blocks, whose places are padded with zeros (`tiled`). Source: NVIDIA,
# cuBLAS, "1D Block Scaling for FP8 and FP4"; Rouhani et al., Microscaling Data Formats, arXiv 2310.10537.
def to_nvfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows (rows, 16 n) to NVFP4: two numbers to a byte, `tiled` e4m3 scales, the tensor's scale in fp32."""
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
    """Return the numbers of `to_nvfp4` times their blocks' scales, exact in fp32, without the tensor's scale."""
    import torch

    rows, half = packed.shape
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(rows, -1, NVFP4_BLOCK)
    per_block = untiled(scales, rows, 2 * half // NVFP4_BLOCK).float()
    return (_e2m1_numbers(codes) * per_block[..., None]).reshape(rows, -1)


def to_mxfp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (rows, 32 n) to MXFP8: e4m3, and `tiled` exponents plus 127, uint8, of the least powers of two."""
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
    rows, columns = numbers.shape
    scales = _powers(untiled(exponents, rows, columns // MXFP8_BLOCK).int())
    blocks = numbers.float().reshape(rows, -1, MXFP8_BLOCK)
    return (blocks * scales[..., None]).reshape(rows, columns)


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
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
    """Round to the nearest number of e2m1, halfway to the even code, larger ones to 6; return codes, uint8."""
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
