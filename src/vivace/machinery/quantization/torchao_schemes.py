"""torchao's schemes. The weight becomes a tensor subclass; the layer stays a Linear or a Conv2d.

The default backend, and the only one that was measured with `compile`. There fp8 makes FLUX.1 [dev] faster: on an H200
an image takes 2.74 s with fp8_static and 2.96 s with fp8, where `compile` alone takes 3.79 s and int8 4.10 s
(docs/techniques-measured.md). torchao's tensors can be made on the meta device, so that `convert` also serves memory
prediction, except where a scale is calibrated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vivace.machinery.quantization.block_schemes import BLOCK_FORMATS
from vivace.machinery.quantization.layers import ONE_ROW, matches_any
from vivace.machinery.quantization.scheme import Scheme, SchemeSettings, no_fp8_on_apple
from vivace.machinery.quantization.torchao_four_bits import FOUR_BITS
from vivace.machinery.quantization.torchao_tensors import (
    PACKAGE,
    fp8_row_weight,
    int8_dynamic_tensor,
    int8_weight_tensor,
    not_a_multiple,
    quantize_layer,
    with_weight,
)

if TYPE_CHECKING:
    import torch

# int8


def _int8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerRow

    if isinstance(layer, torch.nn.Conv2d):
        # torchao's only tensor that knows convolutions without a separate library of kernels.
        return quantize_layer(layer, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    # As Int8WeightOnlyConfig does.
    return with_weight(layer, int8_weight_tensor().from_hp(layer.weight.detach(), PerRow()))


def _int8_dynamic(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    """Quantise as Int8DynamicActivationInt8WeightConfig does."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    inputs = QuantizeTensorToInt8Kwargs(PerRow())
    weight = int8_dynamic_tensor().from_hp(layer.weight.detach(), PerRow(), act_quant_kwargs=inputs)
    return with_weight(layer, weight)


def _int8_dynamic_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    # PyTorch's int8 matmul on GPUs wants more than 16 rows: eager falls back to fp32, compiled it fails.
    if matches_any(name, ONE_ROW):
        return "one row an image, int8 matmuls want more than 16"
    return not_a_multiple(layer, 8)


# fp8


def _fp8_weight(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    return with_weight(layer, _fp8_tensor(layer, settings))


def _fp8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    mm_config = Float8MMConfig(use_fast_accum=True)
    inputs = QuantizeTensorToFloat8Kwargs(
        torch.float8_e4m3fn, _granularity(settings), mm_config, hp_value_lb=_lower_bound(layer)
    )
    weight = _fp8_tensor(layer, settings, mm_config=mm_config, act_quant_kwargs=inputs)
    return with_weight(layer, fp8_row_weight(weight) if settings.granularity == "row" else weight)


def _fp8_static(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    assert settings.input_scale is not None
    return with_weight(layer, _fp8_static_tensor(layer, settings.input_scale))


def _fp8_static_on_meta(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    """Quantise without calibration, so the scale comes with the first inputs: torchao needs one of their rank."""
    layer.register_forward_pre_hook(_set_empty_scale)
    return with_weight(layer, _fp8_static_tensor(layer, None))


def _set_empty_scale(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    import torch

    layer.weight.act_quant_scale = inputs[0].new_ones((1,) * inputs[0].dim(), dtype=torch.float32)


def _fp8_static_tensor(layer: torch.nn.Module, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Return the weight as Float8StaticActivationFloat8WeightConfig makes it, for a fixed scale."""
    import torch
    from torchao.float8.inference import Float8MMConfig
    from torchao.prototype.quantization.float8_static_quant.prototype_float8_tensor import (
        PrototypeFloat8Tensor,
    )
    from torchao.quantization import PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    mm_config = Float8MMConfig(use_fast_accum=True)
    return PrototypeFloat8Tensor.from_hp(
        layer.weight.detach(),
        granularity=PerTensor(),
        mm_config=mm_config,
        hp_value_lb=_lower_bound(layer),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerTensor(), mm_config),
        act_quant_scale=input_scale,
    )


def _fp8_tensor(layer: torch.nn.Module, settings: SchemeSettings, **inputs: Any) -> torch.Tensor:
    """Return the weight as Float8WeightOnlyConfig and Float8DynamicActivationFloat8WeightConfig make it.

    The configurations take no lower bound, and the second refuses a CPU, where its matmuls do run.
    """
    from torchao.quantization.quantize_.workflows import Float8Tensor

    return Float8Tensor.from_hp(
        layer.weight.detach(), granularity=_granularity(settings), hp_value_lb=_lower_bound(layer), **inputs
    )


def _lower_bound(layer: torch.nn.Module) -> float:
    """Return a lower bound for the largest value of a row: e4m3's maximum, 448, times the smallest normal number.

    A row of zeros, such as those of SDXL's empty negative prompt, would otherwise get a scale of zero, and 0/0 spreads.
    """
    import torch

    return float(448 * torch.finfo(layer.weight.dtype).tiny)


def _granularity(settings: SchemeSettings) -> Any:
    from torchao.quantization import PerRow, PerTensor

    return PerRow() if settings.granularity == "row" else PerTensor()


def _fp8_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    import torch

    if settings.machine.is_cuda and settings.granularity == "row" and layer.weight.dtype != torch.bfloat16:
        return "a scale per row wants bf16 (add bf16, or granularity=tensor)"
    if settings.granularity == "tensor" and (reason := _is_one_block(layer)):
        return reason
    return not_a_multiple(layer, 16)


def _fp8_static_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    return not_a_multiple(layer, 16) or _is_one_block(layer)


def _is_one_block(layer: torch.nn.Module) -> str | None:
    """Whether a weight is 128x128: torchao takes its one scale for a scale per block, and the matmul then fails."""
    return "its 128x128 weights are one block to torchao" if tuple(layer.weight.shape) == (128, 128) else None


def _int8_dynamic_unsupported(settings: SchemeSettings) -> str | None:
    if settings.machine.backend == "mps":
        return "PyTorch has no int8 matmul on Apple's GPUs; int8 stores in int8 and computes as before"
    return None


def _fp8_unsupported(settings: SchemeSettings) -> str | None:
    machine = settings.machine
    if machine.is_gpu and not machine.is_cuda:
        return (
            f"matmuls in fp8 are set up for NVIDIA's GPUs; {machine.maker}'s have other formats of fp8, or none; "
            "int8 stores weights in eight bits and computes as before"
        )
    if machine.capability is not None and machine.capability < (8, 9):
        return (
            "matmuls in fp8 need compute capability 8.9 (Ada, Hopper or later), "
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
        "in int8, inputs scaled in each call",
        _int8_dynamic,
        skips=_int8_dynamic_skips,
        unsupported=_int8_dynamic_unsupported,
    ),
    "fp8_weight": Scheme(
        PACKAGE,
        "in fp8 (e4m3)",
        "as before",
        _fp8_weight,
        unsupported=no_fp8_on_apple,
        has_tensor_scales=True,
        cannot_be_cast=True,
    ),
    "fp8": Scheme(
        PACKAGE,
        "in fp8 (e4m3)",
        "in fp8, inputs scaled in each call",
        _fp8,
        skips=_fp8_skips,
        unsupported=_fp8_unsupported,
        has_tensor_scales=True,
    ),
    "fp8_static": Scheme(
        PACKAGE,
        "in fp8 (e4m3), one scale",
        "in fp8, one scale for a layer's inputs, calibrated beforehand",
        _fp8_static,
        _fp8_static_on_meta,
        _fp8_static_skips,
        _fp8_unsupported,
        is_calibrated=True,
    ),
    **FOUR_BITS,
    **BLOCK_FORMATS,
}
