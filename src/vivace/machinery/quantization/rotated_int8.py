"""Weights in int8 whose input channels are rotated, so that no channel of the inputs is much larger than the others.

A linear layer computes the same if inputs and weights are multiplied by one orthogonal matrix. The matrix is ConvRot's
(arXiv 2512.03673), the regular Hadamard matrix in blocks of channels: it spreads an outlier over its block, before one
scale is chosen for a row of inputs. It is its own inverse, and takes sums alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

BLOCKS = (256, 64)
"""Channels that are rotated together: the first of these that divides the inputs."""


def block_of(channels: int) -> int:
    """Return the number of channels that are rotated together; 0 where none of BLOCKS divides them."""
    return next((size for size in BLOCKS if channels % size == 0), 0)


@functools.cache
def rotated_int8() -> Any:
    """Return the class of a rotated weight (out_features, in_features), a tensor with its dequantised dtype.

    qdata: (out_features, in_features), int8. scale: (out_features, 1), fp32.
    """
    import torch
    from torchao.utils import TorchAOBaseTensor

    class RotatedInt8Tensor(TorchAOBaseTensor):  # type: ignore[misc]
        tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
        tensor_attribute_names: ClassVar[list[str]] = ["dtype"]

        def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, qdata.shape, dtype=dtype, device=qdata.device, requires_grad=False
            )

        def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
            super().__init__()
            self.qdata, self.scale = qdata, scale

        def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
            from vivace.machinery.kernels.reference import rotate

            rotated = self.qdata.float() * self.scale
            return rotate(rotated, block_of(self.shape[1])).to(output_dtype or self.dtype)

    def linear(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        return multiply(*args, **kwargs)

    RotatedInt8Tensor.implements_torch_function(torch.nn.functional.linear)(linear)
    RotatedInt8Tensor.implements(torch.ops.aten.linear.default)(linear)
    RotatedInt8Tensor.__qualname__ = "RotatedInt8Tensor"
    return RotatedInt8Tensor


def __getattr__(name: str) -> Any:
    if name == "RotatedInt8Tensor":
        return rotated_int8()
    raise AttributeError(name)


def rotate_weight(weight: torch.Tensor) -> Any:
    """Rotate and quantise a weight (out_features, in_features), a scale per row."""
    return rotated_int8()(*quantise_rows(weight.detach()), dtype=weight.dtype)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (n, channels), rotated, as int8, and their scales (n, 1) in fp32."""
    import torch

    from vivace.machinery.kernels.reference import TINY, rotate
    from vivace.machinery.quantization.packed_int4 import takes_kernel

    size = block_of(rows.shape[1])
    if rows.is_meta:  # what the kernel allocates
        return torch.empty_like(rows, dtype=torch.int8), rows.new_empty((len(rows), 1), dtype=torch.float32)
    if takes_kernel(rows):
        from vivace.machinery.kernels.rotate_rows import rotate_rows

        return rotate_rows(rows.contiguous(), size)
    rotated = rotate(rows, size)
    scale = rotated.abs().amax(1, keepdim=True).clamp(min=TINY) / 127
    return (rotated / scale).round().to(torch.int8), scale


def multiply(inputs: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a Linear layer: int8 times int8 into int32, scaled and shifted in fp32, rounded once."""
    from vivace.machinery.quantization.torchao_tensors import int_mm

    rows, scale = quantise_rows(inputs.reshape(-1, inputs.shape[-1]))
    output = int_mm(rows, weight.qdata.t()) * scale
    output *= weight.scale.t()
    if bias is not None:
        output += bias
    return output.to(inputs.dtype).reshape(*inputs.shape[:-1], weight.shape[0])
