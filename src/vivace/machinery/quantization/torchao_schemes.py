"""torchao's schemes. The weight becomes a tensor subclass; the layer stays a Linear or a Conv2d.

The default backend, and the only one that was measured with `compile`. There fp8 makes FLUX.1 [dev] faster: on an H200
an image takes 2.74 s with fp8_static and 2.96 s with fp8, where `compile` alone takes 3.79 s and int8 4.10 s
(docs/techniques-measured.md). torchao's tensors can be made on the meta device, so that `convert` also serves memory
prediction, except where a scale is calibrated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vivace.machinery.quantization.block_tensors import mxfp8_weight, nvfp4_weight
from vivace.machinery.quantization.layers import ONE_ROW, matches_any
from vivace.machinery.quantization.packed_int4 import pack
from vivace.machinery.quantization.rotated_int8 import BLOCKS, block_of, rotate_weight
from vivace.machinery.quantization.scheme import Scheme, SchemeSettings, no_fp8_on_apple
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

_GROUP = 32  # weights that share a scale in unpacked int4
_NF4_BLOCK = 64
_NF4_SCALES = 256  # scales that share a second scale
_GEMM_GROUP = 128


def _nf4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    from torchao.quantization import NF4Tensor

    # torchao's default, 256 scales per second scale, does not divide many real widths.
    scales = math.gcd(layer.weight.numel() // _NF4_BLOCK, _NF4_SCALES)
    return with_weight(layer, NF4Tensor.from_tensor(layer.weight.detach(), _NF4_BLOCK, scales))


def _nf4_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    num = layer.weight.numel()
    return None if num % _NF4_BLOCK == 0 else f"{num} weights are not a multiple of {_NF4_BLOCK}"


def is_packed(settings: SchemeSettings) -> bool:
    """Whether int4 is packed two weights to a byte: on NVIDIA and AMD GPUs, by vivace."""
    return settings.machine.backend in ("cuda", "rocm")


def _int4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    if is_packed(settings):
        return with_weight(layer, pack(layer.weight))
    return quantize_layer(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_GROUP)))


def _int4_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    if layer.in_features % _GROUP == 0:
        return None
    return f"{layer.in_features} inputs are not a multiple of {_GROUP}"


def _int4_gemm(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    from torchao.quantization import Float8DynamicActivationInt4WeightConfig

    return quantize_layer(layer, Float8DynamicActivationInt4WeightConfig())


def _int4_gemm_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    import torch

    if layer.weight.dtype != torch.bfloat16:
        return "its matmul wants bf16 (add bf16)"
    if layer.in_features % _GEMM_GROUP:
        return f"{layer.in_features} inputs are not a multiple of {_GEMM_GROUP}"
    return not_a_multiple(layer, 16)


def _int4_gemm_unsupported(settings: SchemeSettings) -> str | None:
    machine = settings.machine
    if not machine.is_cuda or (machine.capability is not None and machine.capability < (9, 0)):
        return (
            "matmuls of fp8 inputs with int4 weights need a Hopper GPU or later (compute capability 9.0); int4 stores "
            "weights in four bits and computes as before"
        )
    if not machine.has_package("mslk.gemm"):
        return (
            "its kernels are in PyTorch's mslk (1.0 or later, github.com/pytorch/MSLK), which is not installed; the "
            "package of that name on PyPI may be an empty placeholder. int4 stores weights in four bits and computes "
            "as before"
        )
    return None


FOUR_BITS: dict[str, Scheme] = {
    "nf4": Scheme(
        PACKAGE,
        "in 4 bits, quantiles of a normal distribution, a scale per 64 weights, itself in int8",
        "as before",
        _nf4,
        skips=_nf4_skips,
    ),
    "int4": Scheme(
        PACKAGE,
        "in int4, a scale per 32 to 128 weights; two weights to a byte on GPUs, one elsewhere",
        "as before",
        _int4,
        skips=_int4_skips,
    ),
    "int4_gemm": Scheme(
        PACKAGE,
        f"in int4, a scale per {_GEMM_GROUP} weights",
        "in fp8, inputs scaled in each call",
        _int4_gemm,
        skips=_int4_gemm_skips,
        unsupported=_int4_gemm_unsupported,
    ),
}
# NVFP4 and MXFP8 are vivace's own layers around PyTorch's block-scaled matmuls, which Blackwell's tensor cores have. On
# other GPUs a compiler crashes (nvfp4 on Ada and Hopper, Triton 3.6) or multiplies in bf16 in silence (mxfp8), so both
# are refused. A CPU computes with the same rounded numbers, which is right and slow: the quality of a recipe can be
# judged on any machine. On GPUs nothing of this was measured.
_CAPABILITIES = ((10, 0), (10, 3), (12, 0))
"""Not 12.1, DGX Spark's, for which Triton 3.6 multiplies mxfp8 in bf16 and cannot compile nvfp4."""
_EIGHT_BITS = (*ONE_ROW, "*modulation*", "*_mod", "*adaLN*")
"""Layers that `nvfp4` stores in MXFP8: with one row per image four bits save no time, and all channels depend on that
row."""
_COLUMNS, _ROWS = 32, 16
"""Multiples of input and output channels that cuBLASLt requires."""


def _nvfp4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    if matches_any(settings.layer_name, _EIGHT_BITS):
        return with_weight(layer, mxfp8_weight(layer.weight))
    return with_weight(layer, nvfp4_weight(layer.weight, settings.rank))


def _mxfp8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    return with_weight(layer, mxfp8_weight(layer.weight, settings.rank))


def _skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    import torch

    if settings.machine.is_cuda and layer.weight.dtype != torch.bfloat16:
        return "its matmul wants bf16 (add bf16)"
    rows, columns = layer.weight.shape
    if columns % _COLUMNS:
        return f"{columns} inputs are not a multiple of {_COLUMNS}"
    if rows % _ROWS:
        return f"{rows} outputs are not a multiple of {_ROWS}"
    if 2 * settings.rank >= min(rows, columns):  # more work than the layer's in 16 bits
        return f"rank={settings.rank} is no less than half of {rows}x{columns}"
    return None


def _unsupported(settings: SchemeSettings) -> str | None:
    machine = settings.machine
    instead = "int8_dynamic multiplies in eight bits on other GPUs, and nf4 stores weights in four"
    if machine.is_gpu and not machine.is_cuda:
        return f"tensor cores that scale by blocks are NVIDIA Blackwell's, and this GPU is {machine.maker}'s; {instead}"
    if machine.capability is not None and machine.capability not in _CAPABILITIES:
        if machine.capability >= (8, 9):
            instead = "fp8 multiplies in eight bits, and nf4 stores weights in four"
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in _CAPABILITIES)
        return (
            f"tensor cores that scale by blocks are Blackwell's (compute capability {capabilities}); {instead}; "
            f"{machine.device_name} has {machine.capability[0]}.{machine.capability[1]}"
        )
    return None


BLOCK_FORMATS: dict[str, Scheme] = {
    "nvfp4": Scheme(
        PACKAGE,
        "in NVFP4: 4 bits (e2m1), a scale in e4m3 per 16 weights and one for all; in MXFP8 where inputs are one row an "
        "image",
        "in NVFP4 and MXFP8, inputs scaled in each call",
        _nvfp4,
        skips=_skips,
        unsupported=_unsupported,
        has_low_rank=True,
        emulated_on=("cpu",),
    ),
    "mxfp8": Scheme(
        PACKAGE,
        "in MXFP8: fp8 (e4m3), a power of two per 32 weights",
        "in MXFP8, inputs scaled in each call",
        _mxfp8,
        skips=_skips,
        unsupported=_unsupported,
        has_low_rank=True,
        emulated_on=("cpu",),
    ),
}


def _int8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerRow

    if isinstance(layer, torch.nn.Conv2d):
        # torchao's only tensor that knows convolutions without a separate library of kernels.
        return quantize_layer(layer, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    # As Int8WeightOnlyConfig does.
    return with_weight(layer, int8_weight_tensor().from_hp(layer.weight.detach(), PerRow()))


def _int8_dynamic(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    if settings.rotation != "none":
        return with_weight(layer, rotate_weight(layer.weight))
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    inputs = QuantizeTensorToInt8Kwargs(PerRow())
    weight = int8_dynamic_tensor().from_hp(layer.weight.detach(), PerRow(), act_quant_kwargs=inputs)
    return with_weight(layer, weight)


def _int8_dynamic_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    # PyTorch's int8 matmul on GPUs wants more than 16 rows: eager falls back to fp32, compiled it fails.
    if matches_any(name, ONE_ROW):
        return "one row an image, int8 matmuls want more than 16"
    if settings.rotation != "none" and not block_of(layer.in_features):
        return f"{layer.in_features} inputs are not a multiple of {BLOCKS[-1]}, which are rotated together"
    return not_a_multiple(layer, 8)


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
    """Return the weight as torchao's fp8 configurations make it; they take no lower bound, and refuse a CPU."""
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
        has_rotation=True,
    ),
    "fp8_weight": Scheme(
        PACKAGE,
        "in fp8 (e4m3)",
        "as before",
        lambda layer, settings: with_weight(layer, _fp8_tensor(layer, settings)),
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
