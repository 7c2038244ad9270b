"""How torchao's schemes put a quantised weight into a layer, and a check that several of them share.

Every configuration is told `set_inductor_config=False`: torchao's default changes inductor's settings for the whole
process, and with them whatever is measured after.
"""

from __future__ import annotations

import functools
from typing import Any

PACKAGE = ("torchao", "torchao")


def quantize(layer: Any, config: Any) -> Any:
    from torchao.quantization import quantize_

    quantize_(layer, config, filter_fn=lambda module, name: module is layer)
    return layer


def with_weight(layer: Any, weight: Any) -> Any:
    import torch

    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def not_a_multiple(layer: Any, size: int) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if rows % size == 0 and columns % size == 0 else f"{rows}x{columns} is no multiple of {size}"


_MORE_THAN = 16
"""PyTorch's int8 product on a GPU wants more rows than this."""


@functools.cache
def int8_tensor() -> Any:
    """torchao's Int8Tensor, but that inductor leaves its product on a GPU to cuBLAS.

    Inductor (torch 2.11) knows the product of torchao 0.18: of bf16 by int8, scaled in bf16, it makes PyTorch's
    `_weight_int8pack_mm`. On a GPU that is for the few rows of a language model's next token; a picture has thousands
    (docs/footguns.md). Uncompiled, or in fp16, the weights are widened and cuBLAS multiplies.
    """
    import torch

    def linear(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inputs = args[0]
        if inputs.dtype == torch.bfloat16 and inputs.device.type != "cpu" and _is_traced():
            return int8_weight_linear(*args, **kwargs)
        return theirs(func, types, args, kwargs)

    return _int8_tensor_with("Int8WeightTensor", linear)


@functools.cache
def int8_dynamic_tensor() -> Any:
    """torchao's Int8Tensor, but that its uncompiled product on a GPU runs on the GPU alone.

    torchao 0.18 asks in each call for the text of its inputs, to find out whether it is being traced: they are copied
    to the host, the GPU waits, and no CUDA graph can be recorded. Compiled, and on a CPU, it goes another way, which
    is left to it.
    """
    import torch

    def linear(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args[0].device.type == "cpu":
            return theirs(func, types, args, kwargs)
        return int8_linear(*args, **kwargs)

    return _int8_tensor_with("Int8DynamicTensor", linear)


def _is_traced() -> bool:
    """Whether a compiler is asking. In a tensor's own code torch.compiler.is_compiling() tells so in torch 2.13, not
    yet in 2.11."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def _int8_tensor_with(name: str, linear: Any) -> Any:
    """A subclass of torchao's Int8Tensor; `linear` is told what torchao's own product would be computed by."""
    import torch
    from torchao.quantization import Int8Tensor

    made: Any = type(name, (Int8Tensor,), {"__module__": __name__, "__qualname__": name})
    for implements, table, function in (
        (made.implements_torch_function, "_TORCH_FN_TABLE", torch.nn.functional.linear),
        (made.implements, "_ATEN_OP_TABLE", torch.ops.aten.linear.default),
    ):
        theirs = getattr(Int8Tensor, table)[Int8Tensor][function]

        def computed(func: Any, types: Any, args: Any, kwargs: Any, theirs: Any = theirs) -> Any:
            return linear(theirs, func, types, args, kwargs)

        implements(function)(computed)
    return made


def __getattr__(name: str) -> Any:
    """Where pickle looks for a class, in a process that may not have made it yet."""
    if name == "Int8WeightTensor":
        return int8_tensor()
    if name == "Int8DynamicTensor":
        return int8_dynamic_tensor()
    raise AttributeError(name)


def int8_weight_linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    """A Linear layer's product as torchao's Int8Tensor has it for inputs that are not quantised, but scaled in fp32:
    which is what a compiler computes it in anyway, and keeps inductor from knowing it.

    Args:
        inputs: (..., in_features), floating point.
        weight: an Int8Tensor (out_features, in_features) with a scale per row.
    """
    import torch

    product = torch.nn.functional.linear(inputs, weight.qdata.to(inputs.dtype))
    output = (product * weight.scale.flatten().to(torch.float32)).to(inputs.dtype)
    return output if bias is None else output + bias


def int8_linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    """A Linear layer's product as torchao's Int8Tensor has it with dynamic scales, to the last bit.

    Args:
        inputs: (..., in_features), floating point.
        weight: an Int8Tensor (out_features, in_features) with a scale per row and symmetric `act_quant_kwargs`.
    """
    from torchao.quantization import Int8Tensor

    kwargs = weight.act_quant_kwargs
    rows = Int8Tensor.from_hp(
        inputs, kwargs.granularity, mapping_type=kwargs.mapping_type, reduce_range=kwargs.reduce_range
    )
    sums = _int_mm(rows.qdata.reshape(-1, rows.qdata.shape[-1]), weight.qdata.t())
    scaled = (sums * rows.scale.reshape(-1, 1)).to(inputs.dtype) * weight.scale.flatten()
    output = scaled.reshape(*inputs.shape[:-1], weight.shape[0])
    if bias is not None:
        output += bias
    return output.to(inputs.dtype)


def _int_mm(rows: Any, columns: Any) -> Any:
    """(m, k) by (k, n), both int8, in int32; in fp32 first where there are too few rows, as torchao has it."""
    import torch

    if rows.shape[0] > _MORE_THAN:
        return torch._int_mm(rows, columns)
    return torch.matmul(rows.to(torch.float32), columns.to(torch.float32)).to(torch.int32)
