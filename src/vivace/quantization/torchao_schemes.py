"""torchao's schemes. The weight becomes a tensor subclass; the layer stays a Linear or a Conv2d."""

from __future__ import annotations

from typing import Any

from vivace.quantization.layers import is_named
from vivace.quantization.scheme import Scheme, Settings
from vivace.quantization.torchao_four_bits import FOUR_BITS
from vivace.quantization.torchao_tensors import (
    PACKAGE,
    int8_dynamic_tensor,
    int8_tensor,
    not_a_multiple,
    quantize,
    with_weight,
)

# Layers that see one row for each picture, whatever its size: embeddings of time and of pooled text, modulation.
_ONE_ROW = (
    "*time*",
    "*norm*.linear",
    "add_embedding",
    "*guidance_embed*",
    "text_projection",
    "class_embedding",
)


# int8


def _int8(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerRow

    if isinstance(layer, torch.nn.Conv2d):
        # The only tensor of torchao's that knows convolutions without a library of kernels beside it.
        return quantize(layer, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    # As Int8WeightOnlyConfig does.
    return with_weight(layer, int8_tensor().from_hp(layer.weight.detach(), PerRow()))


def _int8_dynamic(layer: Any, settings: Settings) -> Any:
    """As Int8DynamicActivationInt8WeightConfig does."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    inputs = QuantizeTensorToInt8Kwargs(PerRow())
    weight = int8_dynamic_tensor().from_hp(layer.weight.detach(), PerRow(), act_quant_kwargs=inputs)
    return with_weight(layer, weight)


def _int8_dynamic_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    # PyTorch's int8 product on GPUs wants more than 16 rows: eager falls back to fp32, compiled it fails.
    if any(is_named(name, pattern) for pattern in _ONE_ROW):
        return "one row a picture, int8 products want more than 16"
    return not_a_multiple(layer, 8)


# fp8


def _fp8_weight(layer: Any, settings: Settings) -> Any:
    return with_weight(layer, _fp8_tensor(layer, settings))


def _fp8(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    products = Float8MMConfig(use_fast_accum=True)
    inputs = QuantizeTensorToFloat8Kwargs(
        torch.float8_e4m3fn, _granularity(settings), products, hp_value_lb=_least(layer)
    )
    return with_weight(layer, _fp8_tensor(layer, settings, mm_config=products, act_quant_kwargs=inputs))


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
    return with_weight(layer, weight)


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
        return "a scale per row wants bf16 (add bf16, or granularity=tensor)"
    if settings.granularity == "tensor" and (reason := _taken_for_a_block(layer)):
        return reason
    return not_a_multiple(layer, 16)


def _fp8_static_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    return not_a_multiple(layer, 16) or _taken_for_a_block(layer)


def _taken_for_a_block(layer: Any) -> str | None:
    """torchao takes one scale for 128x128 weights for a scale per block of 128x128, and its product then fails."""
    return "its 128x128 weights are one block to torchao" if tuple(layer.weight.shape) == (128, 128) else None


def fp8_lacks(settings: Settings) -> str | None:
    machine = settings.machine
    if machine.capability is not None and machine.capability < (8, 9):
        return (
            "products in fp8 need compute capability 8.9 (Ada, Hopper or later), "
            f"{machine.device_name} has {machine.capability[0]}.{machine.capability[1]}; "
            "fp8_weight stores in fp8 and computes as before"
        )
    return None


TORCHAO: dict[str, Scheme] = {
    "int8": Scheme(
        PACKAGE,
        "in int8, a scale per output row",
        "as before",
        _int8,
        takes_convolutions=True,
    ),
    "int8_dynamic": Scheme(
        PACKAGE,
        "in int8, a scale per output row",
        "in int8, inputs scaled anew in each call",
        _int8_dynamic,
        _int8_dynamic_keeps,
    ),
    "fp8_weight": Scheme(
        PACKAGE,
        "in fp8 (e4m3)",
        "as before",
        _fp8_weight,
        has_tensor_scales=True,
        keeps_dtype=True,
    ),
    "fp8": Scheme(
        PACKAGE,
        "in fp8 (e4m3)",
        "in fp8, inputs scaled anew in each call",
        _fp8,
        _fp8_keeps,
        fp8_lacks,
        has_tensor_scales=True,
    ),
    "fp8_static": Scheme(
        PACKAGE,
        "in fp8 (e4m3), one scale",
        "in fp8, one scale for a layer's inputs, chosen before by looking at what is drawn",
        _fp8_static,
        _fp8_static_keeps,
        fp8_lacks,
        is_calibrated=True,
    ),
    **FOUR_BITS,
}
