"""Weights in NVFP4 and MXFP8 as tensors whose Linear quantises its inputs in the same format and multiplies both.

On a GPU cuBLASLt multiplies them (`torch._scaled_mm`). Elsewhere the products of the same rounded numbers are summed in
fp32, which differs from the GPU in the order of the sums only. Where a matmul leaves NVFP4's two fp32 scales to be
applied behind it, as cuBLASLt's in PyTorch does, that order is kept: rounded, scaled with the bias in fp32, rounded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.machinery.quantization.block_formats import from_mxfp8, from_nvfp4, to_mxfp8, to_nvfp4

if TYPE_CHECKING:
    import torch


_MORE = 8
"""Extra directions that are computed, so that the last kept one is accurate as well."""
_PASSES = 4


@functools.cache
def _block_tensor() -> Any:
    """The shared part of the two classes."""
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
    """Make a class on demand where pickle looks for it, in a process that has not made it yet."""
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
    """Return the same as an MxFp8Tensor."""
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
    """Return the weight's `rank` largest singular directions as two matrices.

    They are found by subspace iteration from seeded noise, so that the same weight gives the same matrices.
    Source: Halko, Martinsson and Tropp, arXiv 0909.4061.

    Args:
        weight: (out_features, in_features), floating point.

    Returns:
        `up` (out_features, rank) and `down` (rank, in_features), in the weight's dtype, whose product is subtracted
        from the weight; each has the square roots of the singular values.
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
    """Return a weight less its branch, in fp32; the branch as it is stored."""
    rest: torch.Tensor = weight.detach().float() - up.float() @ down.float()
    return rest
