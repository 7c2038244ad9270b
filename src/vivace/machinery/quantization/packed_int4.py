"""Four-bit weights, packed two to a byte and dequantised before each matmul.

PyTorch's int4 matmul (tinygemm) is made for a few rows, such as a language model's next token. With the 4,608 tokens of
FLUX.1 [dev] it took eleven times as long as bf16 (results/int4-tinygemm-flux-dev.json, torchao's Int4WeightOnlyConfig);
it also pads inputs to 1024 and takes only bf16. An image has thousands of rows. For those, dequantising costs one pass
over the weights (2.5 bytes each), little beside the matmul, which is then cuBLAS's in full precision.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

GROUPS = (128, 64, 32)
"""Weights that share a scale and a zero: the largest of these that divides the inputs."""


def group_size(in_features: int) -> int:
    """Return the size of a group; 0 where none of GROUPS divides."""
    return next((size for size in GROUPS if in_features % size == 0), 0)


@functools.cache
def packed_int4() -> Any:
    """Return the class of a packed weight (out_features, in_features), a tensor with its dequantised dtype.

    packed: (out_features, in_features / 2), uint8; of two neighbours the first is in the low four bits.
    scale, zero: (out_features, in_features / group), in that dtype. A weight is (q - 8) * scale + zero, q in 0..15.
    """
    import torch
    from torchao.utils import TorchAOBaseTensor

    class PackedInt4Tensor(TorchAOBaseTensor):  # type: ignore[misc]
        tensor_data_names: ClassVar[list[str]] = ["packed", "scale", "zero"]
        tensor_attribute_names: ClassVar[list[str]] = ["dtype"]

        def __new__(
            cls, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
        ) -> Any:
            shape = (packed.shape[0], 2 * packed.shape[1])
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=packed.device, requires_grad=False
            )

        def __init__(
            self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
        ) -> None:
            super().__init__()
            self.packed, self.scale, self.zero = packed, scale, zero

        def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
            return dequantize(self.packed, self.scale, self.zero, output_dtype or self.dtype)

    def linear(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        inputs, weight = args[:2]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return torch.nn.functional.linear(inputs, weight.dequantize(inputs.dtype), bias)

    PackedInt4Tensor.implements_torch_function(torch.nn.functional.linear)(linear)
    PackedInt4Tensor.implements(torch.ops.aten.linear.default)(linear)
    PackedInt4Tensor.__qualname__ = "PackedInt4Tensor"
    return PackedInt4Tensor


def __getattr__(name: str) -> Any:
    if name == "PackedInt4Tensor":
        return packed_int4()
    raise AttributeError(name)


def pack(weight: torch.Tensor) -> Any:
    """Quantise a weight (out_features, in_features): a group is spread over sixteen values, smallest to largest."""
    import torch

    rows, columns = weight.shape
    groups = weight.detach().float().reshape(rows, -1, group_size(columns))
    smallest, largest = groups.aminmax(dim=-1)
    # In a group of equal weights any scale will do that is not zero in the weight's own dtype.
    scale = ((largest - smallest) / 15).clamp(min=1e-6)
    values = ((groups - smallest[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
    values = values.reshape(rows, columns)
    packed = values[:, 0::2] | values[:, 1::2] << 4
    zero = smallest + 8 * scale
    return packed_int4()(
        packed.contiguous(), scale.to(weight.dtype), zero.to(weight.dtype), dtype=weight.dtype
    )


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights (out_features, in_features), computed in fp32 and rounded once."""
    import torch

    if packed.is_meta:
        return packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)
    if takes_kernel(packed):
        from vivace.machinery.kernels.dequantize_int4 import dequantize as dequantize_in_one_pass

        return dequantize_in_one_pass(packed, scale, zero, dtype)
    values = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*scale.shape, -1)
    weights = (values.float() - 8) * scale.float()[..., None] + zero.float()[..., None]
    return weights.to(dtype).reshape(packed.shape[0], -1)


def takes_kernel(packed: torch.Tensor) -> bool:
    """Whether vivace's kernel dequantises this tensor; a tracer may call with tensors of its own class, without
    data."""
    import torch

    is_traced = type(packed) is not torch.Tensor or torch.compiler.is_compiling()
    return bool(packed.is_cuda) and not is_traced and _has_triton()


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())
