"""Schemes of four bits a weight: torchao's, but that on a GPU int4 is our own."""

from __future__ import annotations

import math
from typing import Any

from vivace.quantization.packed_int4 import pack
from vivace.quantization.scheme import Scheme, Settings
from vivace.quantization.torchao_tensors import PACKAGE, not_a_multiple, quantize, with_weight

_GROUP = 32  # weights that share a scale in unpacked int4
_NF4_BLOCK = 64
_NF4_SCALES = 256  # scales that share a second scale
_GEMM_GROUP = 128


def _nf4(layer: Any, settings: Settings) -> Any:
    from torchao.quantization import NF4Tensor

    # torchao's default of 256 scales to a second one divides few real widths.
    scales = math.gcd(layer.weight.numel() // _NF4_BLOCK, _NF4_SCALES)
    return with_weight(layer, NF4Tensor.from_tensor(layer.weight.detach(), _NF4_BLOCK, scales))


def _nf4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    num = layer.weight.numel()
    return None if num % _NF4_BLOCK == 0 else f"{num} weights are no multiple of {_NF4_BLOCK}"


def is_packed(settings: Settings) -> bool:
    """Whether int4 is stored two weights a byte: on GPUs, by us."""
    return settings.machine.is_cuda


def _int4(layer: Any, settings: Settings) -> Any:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    if not is_packed(settings):
        return quantize(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_GROUP)))
    return with_weight(layer, pack(layer.weight))


def _int4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    return (
        None if layer.in_features % _GROUP == 0 else f"{layer.in_features} inputs are no multiple of {_GROUP}"
    )


def _int4_gemm(layer: Any, settings: Settings) -> Any:
    from torchao.quantization import Float8DynamicActivationInt4WeightConfig

    return quantize(layer, Float8DynamicActivationInt4WeightConfig())


def _int4_gemm_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    import torch

    if layer.weight.dtype != torch.bfloat16:
        return "its product wants bf16 (add bf16)"
    if layer.in_features % _GEMM_GROUP:
        return f"{layer.in_features} inputs are no multiple of {_GEMM_GROUP}"
    return not_a_multiple(layer, 16)


def _int4_gemm_lacks(settings: Settings) -> str | None:
    machine = settings.machine
    if not machine.is_cuda or (machine.capability is not None and machine.capability < (9, 0)):
        return (
            "its products of fp8 inputs with int4 weights need a Hopper GPU or later (compute capability 9.0); "
            "int4 stores in four bits and computes as before"
        )
    if not machine.has_package("mslk.gemm"):
        return (
            "its kernels are in PyTorch's mslk (1.0 or later, github.com/pytorch/MSLK), which is not installed; the "
            "package of that name on PyPI may be an empty placeholder. int4 stores in four bits and computes as before"
        )
    return None


FOUR_BITS: dict[str, Scheme] = {
    "nf4": Scheme(
        PACKAGE,
        "in 4 bits, quantiles of a normal distribution, a scale per 64 weights which is itself in int8",
        "as before",
        _nf4,
        _nf4_keeps,
    ),
    "int4": Scheme(
        PACKAGE,
        "in int4, a scale per 32 to 128 weights; two a byte on GPUs, elsewhere a byte each",
        "as before",
        _int4,
        _int4_keeps,
    ),
    "int4_gemm": Scheme(
        PACKAGE,
        f"in int4, a scale per {_GEMM_GROUP} weights",
        "in fp8, inputs scaled anew in each call",
        _int4_gemm,
        _int4_gemm_keeps,
        _int4_gemm_lacks,
    ),
}
