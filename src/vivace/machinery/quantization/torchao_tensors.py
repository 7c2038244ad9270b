"""Put torchao's quantised weights into layers, and subclasses of its tensors with other matmuls.

Every configuration is given `set_inductor_config=False`: torchao's default changes inductor's settings for the whole
process, and so everything that is measured later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = ("torchao", "torchao")


def quantize_layer(layer: torch.nn.Module, config: Any) -> torch.nn.Module:
    from torchao.quantization import quantize_

    quantize_(layer, config, filter_fn=lambda module, name: module is layer)
    return layer


def with_weight(layer: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    import torch

    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def not_a_multiple(layer: torch.nn.Module, size: int) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return (
        None if rows % size == 0 and columns % size == 0 else f"{rows}x{columns} is not a multiple of {size}"
    )


_INT_MM_MIN_ROWS = 17
"""The fewest rows that PyTorch's int8 matmul takes on a GPU."""


@functools.cache
def int8_weight_tensor() -> Any:
    """Return torchao's Int8Tensor with a matmul that inductor leaves to cuBLAS on a GPU.

    Inductor (torch 2.11) recognises the matmul of torchao 0.18, bf16 by int8 and scaled in bf16, and replaces it by
    PyTorch's `_weight_int8pack_mm`. On a GPU that kernel is made for the few rows of a language model's next token; an
    image has thousands (docs/footguns.md). Not compiled, or in fp16, torchao dequantises the weights and cuBLAS
    multiplies.
    """
    import torch

    def linear(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inputs = args[0]
        if inputs.dtype == torch.bfloat16 and inputs.device.type != "cpu" and _is_traced():
            return int8_weight_linear(*args, **kwargs)
        return theirs(func, types, args, kwargs)

    return _subclass(_int8_tensor(), "Int8WeightTensor", linear)


@functools.cache
def int8_dynamic_tensor() -> Any:
    """Return torchao's Int8Tensor with an uncompiled matmul that does not wait for the GPU.

    torchao 0.18 formats its inputs as text in each call to find out whether it is being traced. That copies them to the
    host and waits for the GPU, and a CUDA graph cannot capture it. Compiled, and on a CPU, torchao takes another path,
    which stays.
    """
    import torch

    def linear(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args[0].device.type == "cpu":
            return theirs(func, types, args, kwargs)
        return int8_dynamic_linear(*args, **kwargs)

    return _subclass(_int8_tensor(), "Int8DynamicTensor", linear)


_FP8_LACKING = ("cuda",)
_FP8_FEW_ROWS = 256
_FP8_LONG_SUM = 4096
"""cuBLAS has no fp8 matmul with a scale per row for so few rows whose sums are longer than this: 127 rows of 9,216
channels fail and 3,072 channels do not (https://github.com/pytorch/ao/issues/4582, H100; an H200 fails for 23 rows of
12,288, with torch 2.11). Where it begins to fail is not known; FLUX.1 has sums of 3,072 and one row."""


@functools.cache
def fp8_row_tensor() -> Any:
    """Return torchao's Float8Tensor with a scale per row, which pads matmuls of few rows that cuBLAS lacks."""
    from torchao.quantization.quantize_.workflows import Float8Tensor

    def linear(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inputs, weight = args[0], args[1]
        few_rows = inputs.numel() // inputs.shape[-1] <= _FP8_FEW_ROWS
        if inputs.device.type in _FP8_LACKING and few_rows and weight.shape[1] > _FP8_LONG_SUM:
            return in_more_rows(lambda padded: theirs(func, types, (padded, *args[1:]), kwargs), inputs)
        return theirs(func, types, args, kwargs)

    return _subclass(Float8Tensor, "Fp8RowTensor", linear)


def fp8_row_weight(weight: Any) -> torch.Tensor:
    """Return a Float8Tensor with a scale per row as one of `fp8_row_tensor`, over the same memory."""
    made: torch.Tensor = fp8_row_tensor()(
        weight.qdata,
        weight.scale,
        block_size=weight.block_size,
        mm_config=weight.mm_config,
        act_quant_kwargs=weight.act_quant_kwargs,
        kernel_preference=weight.kernel_preference,
        dtype=weight.dtype,
    )
    return made


def in_more_rows(linear: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Call a layer with rows of zeros added to its inputs, and return the output of the original rows."""
    import torch

    rows = inputs.reshape(-1, inputs.shape[-1])
    number = rows.shape[0]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, _FP8_FEW_ROWS + 16 - number))
    output = linear(padded)[:number]
    return output.reshape(*inputs.shape[:-1], output.shape[-1])


def _is_traced() -> bool:
    """Whether a compiler is tracing; inside tensor subclasses `is_compiling()` says so from torch 2.13 on alone."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def _int8_tensor() -> Any:
    from torchao.quantization import Int8Tensor

    return Int8Tensor


def _subclass(base: Any, name: str, linear: Any) -> Any:
    """Make a subclass of a tensor of torchao's; `linear` gets torchao's own implementation as its first argument."""
    import torch

    made: Any = type(name, (base,), {"__module__": __name__, "__qualname__": name})
    for implements, table, function in (
        (made.implements_torch_function, "_TORCH_FN_TABLE", torch.nn.functional.linear),
        (made.implements, "_ATEN_OP_TABLE", torch.ops.aten.linear.default),
    ):
        theirs = getattr(base, table)[base][function]

        def computed(func: Any, types: Any, args: Any, kwargs: Any, theirs: Any = theirs) -> Any:
            return linear(theirs, func, types, args, kwargs)

        implements(function)(computed)
    return made


def __getattr__(name: str) -> Any:
    if name == "Int8WeightTensor":
        return int8_weight_tensor()
    if name == "Int8DynamicTensor":
        return int8_dynamic_tensor()
    if name == "Fp8RowTensor":
        return fp8_row_tensor()
    raise AttributeError(name)


def int8_weight_linear(inputs: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a Linear layer with int8 weights as torchao's Int8Tensor does, but scale in fp32.

    A compiler computes the scaling in fp32 anyway, and inductor does not recognise this form.
    """
    import torch

    sums = torch.nn.functional.linear(inputs, weight.qdata.to(inputs.dtype))
    output = (sums * weight.scale.flatten().to(torch.float32)).to(inputs.dtype)
    return output if bias is None else output + bias


def int8_dynamic_linear(inputs: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a Linear layer in int8 with dynamic scales, bit for bit as torchao's Int8Tensor does."""
    from torchao.quantization import Int8Tensor

    kwargs = weight.act_quant_kwargs
    rows = Int8Tensor.from_hp(
        inputs, kwargs.granularity, mapping_type=kwargs.mapping_type, reduce_range=kwargs.reduce_range
    )
    sums = int_mm(rows.qdata.reshape(-1, rows.qdata.shape[-1]), weight.qdata.t())
    scaled = (sums * rows.scale.reshape(-1, 1)).to(inputs.dtype) * weight.scale.flatten()
    output = scaled.reshape(*inputs.shape[:-1], weight.shape[0])
    if bias is not None:
        output += bias
    return output.to(inputs.dtype)


def int_mm(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Multiply (m, k) by (k, n), both int8, into int32; through fp32 where there are too few rows, as torchao does."""
    import torch

    if rows.shape[0] >= _INT_MM_MIN_ROWS:
        return torch._int_mm(rows, columns)
    return torch.matmul(rows.to(torch.float32), columns.to(torch.float32)).to(torch.int32)
