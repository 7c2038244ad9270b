"""Weights of four bits, two a byte, which are widened in front of each product.

PyTorch's own int4 product (tinygemm) is made for a handful of rows, such as a language model's next token. With the
4,608 tokens of FLUX.1 [dev] it took eleven times as long as bf16 (results/int4-tinygemm-flux-dev.json, of torchao's
Int4WeightOnlyConfig); it pads inputs to 1024, and knows bf16 alone. For as many rows as pictures have, widening costs
one pass over the weights, small beside the product, which then is the library's in full precision.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

GROUPS = (128, 64, 32)
"""Weights that share a scale and a zero: the largest that divides the inputs."""


def group_of(in_features: int) -> int:
    """0 where none of GROUPS divides."""
    return next((size for size in GROUPS if in_features % size == 0), 0)


@functools.cache
def packed_int4() -> Any:
    """The class of a quantised weight (out_features, in_features): a tensor with the dtype that it is widened to.

    packed: (out_features, in_features / 2), uint8; of two neighbours the first is in the low four bits.
    scale, zero: (out_features, in_features / group), in that dtype. A weight is (q - 8) * scale + zero, q in 0..15.
    """
    import torch
    from torchao.utils import TorchAOBaseTensor

    class PackedInt4Tensor(TorchAOBaseTensor):  # type: ignore[misc]
        tensor_data_names: ClassVar[list[str]] = ["packed", "scale", "zero"]
        tensor_attribute_names: ClassVar[list[str]] = ["dtype"]

        def __new__(cls, packed: Any, scale: Any, zero: Any, dtype: Any) -> Any:
            shape = (packed.shape[0], 2 * packed.shape[1])
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=packed.device, requires_grad=False
            )

        def __init__(self, packed: Any, scale: Any, zero: Any, dtype: Any) -> None:
            super().__init__()
            self.packed, self.scale, self.zero = packed, scale, zero

        def dequantize(self, output_dtype: Any = None) -> Any:
            return widened(self.packed, self.scale, self.zero, output_dtype or self.dtype)

    def linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inputs, weight = args[:2]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return torch.nn.functional.linear(inputs, weight.dequantize(inputs.dtype), bias)

    PackedInt4Tensor.implements_torch_function(torch.nn.functional.linear)(linear)
    PackedInt4Tensor.implements(torch.ops.aten.linear.default)(linear)
    PackedInt4Tensor.__qualname__ = "PackedInt4Tensor"
    return PackedInt4Tensor


def __getattr__(name: str) -> Any:
    """Where pickle looks for the class, in a process that may not have made it yet."""
    if name == "PackedInt4Tensor":
        return packed_int4()
    raise AttributeError(name)


def pack(weight: Any) -> Any:
    """A PackedInt4Tensor; each group is spread over the sixteen values between its least and its largest weight.

    Args:
        weight: (out_features, in_features), floating point; in_features divisible by one of GROUPS.
    """
    import torch

    rows, columns = weight.shape
    groups = weight.detach().float().reshape(rows, -1, group_of(columns))
    least, largest = groups.aminmax(dim=-1)
    # A group of equal weights has no width; any scale will do, so long as it is no zero in the weight's own dtype.
    scale = ((largest - least) / 15).clamp(min=1e-6)
    values = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
    values = values.reshape(rows, columns)
    packed = values[:, 0::2] | values[:, 1::2] << 4
    zero = least + 8 * scale
    return packed_int4()(
        packed.contiguous(), scale.to(weight.dtype), zero.to(weight.dtype), dtype=weight.dtype
    )


def widened(packed: Any, scale: Any, zero: Any, dtype: Any) -> Any:
    """The weights (out_features, in_features), computed in fp32 and rounded once.

    Compiled, the same is left to the compiler, which makes one kernel of it.
    """
    import torch

    if packed.is_meta:
        return packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)
    if takes_kernel(packed):
        from vivace.kernels.dequantize_int4 import widen

        return widen(packed, scale, zero, dtype)
    values = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*scale.shape, -1)
    wide = (values.float() - 8) * scale.float()[..., None] + zero.float()[..., None]
    return wide.to(dtype).reshape(packed.shape[0], -1)


def takes_kernel(packed: Any) -> bool:
    """Whether our own kernel widens this. Whoever traces calls with tensors of a class of its own, without data, also
    where `is_compiling` says nothing of it."""
    import torch

    is_traced = type(packed) is not torch.Tensor or torch.compiler.is_compiling()
    return bool(packed.is_cuda) and not is_traced and _has_triton()


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())
