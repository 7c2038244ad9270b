"""Schemes of four bits a weight: torchao's, except that int4 on a GPU is vivace's own (`packed_int4`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vivace.machinery.quantization.packed_int4 import pack
from vivace.machinery.quantization.scheme import Scheme, SchemeSettings
from vivace.machinery.quantization.torchao_tensors import PACKAGE, not_a_multiple, quantize_layer, with_weight

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
