"""torchao's schemes. The weight becomes a tensor subclass; the layer stays a Linear or a Conv2d.

Every configuration is told `set_inductor_config=False`: torchao's default changes inductor's settings for the whole
process, and with them whatever is measured after.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.techniques.quantization.held import held
from vivace.techniques.quantization.layers import is_named
from vivace.techniques.quantization.scheme import Scheme, Settings

_PACKAGE = ("torchao", "torchao")
_GROUP = 32  # weights that share a scale in unpacked int4
_GROUPS_PACKED = (128, 64, 32)  # the largest that divides; those that tinygemm knows
_TILE = 1024  # tinygemm pads the inputs of a layer to a multiple of this
_NF4_BLOCK = 64
_NF4_SCALES = 256  # scales that share a second scale
_GEMM_GROUP = 128
# Layers that see one row for each picture, whatever its size: embeddings of time and of pooled text, modulation.
_ONE_ROW = (
    "*time*",
    "*norm*.linear",
    "add_embedding",
    "*guidance_embed*",
    "text_projection",
    "class_embedding",
)


def _quantize(layer: Any, config: Any) -> Any:
    from torchao.quantization import quantize_

    quantize_(layer, config, filter_fn=lambda module, name: module is layer)
    return layer


def _with_weight(layer: Any, weight: Any) -> Any:
    import torch

    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


# int8


def _int8(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis

    if isinstance(layer, torch.nn.Conv2d):
        # The only tensor of torchao's that knows convolutions without a library of kernels beside it.
        return _quantize(layer, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    return _quantize(layer, Int8WeightOnlyConfig(set_inductor_config=False))


def _int8_dynamic(layer: Any, settings: Settings) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _quantize(layer, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))


def _int8_dynamic_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    # PyTorch's int8 product on GPUs wants more than 16 rows: eager falls back to fp32, compiled it fails.
    if any(is_named(name, pattern) for pattern in _ONE_ROW):
        return "one row a picture, int8 products want more than 16"
    return _not_a_multiple(layer, 8)


# fp8


def _fp8_weight(layer: Any, settings: Settings) -> Any:
    return _with_weight(layer, _fp8_tensor(layer, settings))


def _fp8(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    products = Float8MMConfig(use_fast_accum=True)
    inputs = QuantizeTensorToFloat8Kwargs(
        torch.float8_e4m3fn, _granularity(settings), products, hp_value_lb=_least(layer)
    )
    return _with_weight(layer, _fp8_tensor(layer, settings, mm_config=products, act_quant_kwargs=inputs))


def _fp8_static(layer: Any, settings: Settings) -> Any:
    """As Float8StaticActivationFloat8WeightConfig does, given the scale."""
    import torch
    from torchao.float8.inference import Float8MMConfig
    from torchao.prototype.quantization.float8_static_quant.prototype_float8_tensor import (
        PrototypeFloat8Tensor,
    )
    from torchao.quantization import PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    products = Float8MMConfig(use_fast_accum=True)
    weight = PrototypeFloat8Tensor.from_hp(
        layer.weight.detach(),
        granularity=PerTensor(),
        mm_config=products,
        hp_value_lb=_least(layer),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerTensor(), products),
        act_quant_scale=settings.scale,
    )
    if settings.scale is None:
        layer.register_forward_pre_hook(_scale_of_any_rank)
    return _with_weight(layer, weight)


def _scale_of_any_rank(layer: Any, inputs: tuple[Any, ...]) -> None:
    """torchao wants a scale of the inputs' rank, which is not known before something has been drawn."""
    import torch

    layer.weight.act_quant_scale = inputs[0].new_ones((1,) * inputs[0].dim(), dtype=torch.float32)


def _fp8_tensor(layer: Any, settings: Settings, **inputs: Any) -> Any:
    """The weight as Float8WeightOnlyConfig and Float8DynamicActivationFloat8WeightConfig make it.

    Those leave no room for the lower bound, and the second refuses a CPU, where its products do run.
    """
    from torchao.quantization.quantize_.workflows import Float8Tensor

    return Float8Tensor.from_hp(
        layer.weight.detach(), granularity=_granularity(settings), hp_value_lb=_least(layer), **inputs
    )


def _least(layer: Any) -> float:
    """The least that the largest of a row is taken for: 448, e4m3's largest, times a scale that is no subnormal number.

    A row of zeros, such as those of SDXL's empty negative prompt, else has a scale of zero, and 0/0 spreads.
    """
    import torch

    return float(448 * torch.finfo(layer.weight.dtype).tiny)


def _granularity(settings: Settings) -> Any:
    from torchao.quantization import PerRow, PerTensor

    return PerRow() if settings.granularity == "row" else PerTensor()


def _fp8_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    import torch

    if settings.machine.is_cuda and settings.granularity == "row" and layer.weight.dtype != torch.bfloat16:
        return "a scale per row wants bf16"
    if settings.granularity == "tensor" and (reason := _taken_for_a_block(layer)):
        return reason
    return _not_a_multiple(layer, 16)


def _fp8_static_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    return _not_a_multiple(layer, 16) or _taken_for_a_block(layer)


def _taken_for_a_block(layer: Any) -> str | None:
    """torchao takes one scale for 128x128 weights for a scale per block of 128x128, and its product then fails."""
    return "its 128x128 weights are one block to torchao" if tuple(layer.weight.shape) == (128, 128) else None


def _fp8_lacks(settings: Settings) -> str | None:
    machine = settings.machine
    if machine.capability is not None and machine.capability < (8, 9):
        return (
            "products in fp8 need compute capability 8.9 (Ada, Hopper or later), "
            f"{machine.device_name} has {machine.capability[0]}.{machine.capability[1]}; "
            "fp8_weight stores in fp8 and computes as before"
        )
    return None


def _not_a_multiple(layer: Any, size: int) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if rows % size == 0 and columns % size == 0 else f"{rows}x{columns} is no multiple of {size}"


# 4 bits


def _nf4(layer: Any, settings: Settings) -> Any:
    from torchao.quantization import NF4Tensor

    # torchao's default of 256 scales to a second one divides few real widths.
    scales = math.gcd(layer.weight.numel() // _NF4_BLOCK, _NF4_SCALES)
    return _with_weight(layer, NF4Tensor.from_tensor(layer.weight.detach(), _NF4_BLOCK, scales))


def _nf4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    num = layer.weight.numel()
    return None if num % _NF4_BLOCK == 0 else f"{num} weights are no multiple of {_NF4_BLOCK}"


def is_packed(layer: Any, settings: Settings) -> bool:
    """Whether int4 is stored two weights a byte: where PyTorch's int4 kernels run."""
    import torch

    return settings.machine.is_cuda and layer.weight.dtype == torch.bfloat16


def _int4(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if not is_packed(layer, settings):
        return _quantize(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_GROUP)))
    group = _packed_group(layer)
    if not settings.has_data:
        packed, scales = _packed_shapes(layer)
        return held(layer, (packed, torch.int32), (scales, torch.bfloat16), widens=False, multiple=_TILE)
    config = Int4WeightOnlyConfig(
        group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    return _quantize(layer, config)


def _packed_group(layer: Any) -> int:
    return next((size for size in _GROUPS_PACKED if layer.in_features % size == 0), 0)


def _packed_shapes(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the packed weights (int32) and of scales and zeros (bf16)."""
    rows = -(-layer.out_features // 8) * 8
    columns = -(-layer.in_features // _TILE) * _TILE
    return (rows // 8, columns // 128, 32, 4), (columns // _packed_group(layer), rows, 2)


def _int4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    if layer.in_features % _GROUP:
        return f"{layer.in_features} inputs are no multiple of {_GROUP}"
    if is_packed(layer, settings):
        packed, scales = _packed_shapes(layer)
        if 4 * math.prod(packed) + 2 * math.prod(scales) >= 2 * layer.weight.numel():
            return f"{layer.in_features} inputs would be padded to {_TILE}, and take no less"
    return None


def _int4_gemm(layer: Any, settings: Settings) -> Any:
    from torchao.quantization import Float8DynamicActivationInt4WeightConfig

    return _quantize(layer, Float8DynamicActivationInt4WeightConfig())


def _int4_gemm_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    import torch

    if layer.weight.dtype != torch.bfloat16:
        return "its product wants bf16"
    if layer.in_features % _GEMM_GROUP:
        return f"{layer.in_features} inputs are no multiple of {_GEMM_GROUP}"
    return _not_a_multiple(layer, 16)


def _int4_gemm_lacks(settings: Settings) -> str | None:
    machine = settings.machine
    if not machine.is_cuda or (machine.capability is not None and machine.capability < (9, 0)):
        return (
            "its products of fp8 inputs with int4 weights need a Hopper GPU or later (compute capability 9.0); "
            "int4 stores in four bits and computes as before"
        )
    try:
        import mslk.gemm
    except ImportError:
        return (
            "its kernels are in PyTorch's mslk (1.0 or later, github.com/pytorch/MSLK), which is not installed; the "
            "package of that name on PyPI may be an empty placeholder. int4 stores in four bits and computes as before"
        )
    assert mslk.gemm is not None
    return None


TORCHAO: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "int8 weights, a scale per output row; products as before",
        _int8,
        takes_convolutions=True,
    ),
    "int8_dynamic": Scheme(
        _PACKAGE,
        "int8 weights and, scaled anew in each call, int8 inputs; products in int8",
        _int8_dynamic,
        _int8_dynamic_keeps,
    ),
    "fp8_weight": Scheme(
        _PACKAGE,
        "fp8 (e4m3) weights with scales; products as before",
        _fp8_weight,
        has_tensor_scales=True,
        keeps_dtype=True,
    ),
    "fp8": Scheme(
        _PACKAGE,
        "fp8 weights and, scaled anew in each call, fp8 inputs; products in fp8",
        _fp8,
        _fp8_keeps,
        _fp8_lacks,
        has_tensor_scales=True,
    ),
    "fp8_static": Scheme(
        _PACKAGE,
        "fp8 weights and inputs, one scale each, chosen before by looking at what is drawn; products in fp8",
        _fp8_static,
        _fp8_static_keeps,
        _fp8_lacks,
        is_calibrated=True,
    ),
    "nf4": Scheme(
        _PACKAGE,
        "4 bits on a scale of normal quantiles, a scale per 64 weights which is itself int8; products as before",
        _nf4,
        _nf4_keeps,
    ),
    "int4": Scheme(
        _PACKAGE,
        "int4 weights; packed with tinygemm on GPUs in bf16, elsewhere a byte each; products as before",
        _int4,
        _int4_keeps,
    ),
    "int4_gemm": Scheme(
        _PACKAGE,
        "int4 weights, fp8 inputs; products in fp8",
        _int4_gemm,
        _int4_gemm_keeps,
        _int4_gemm_lacks,
    ),
}
