"""NVFP4 and MXFP8: vivace's own layers around PyTorch's block-scaled matmuls, which Blackwell's tensor cores have.

No other GPU has the instructions. There a compiler crashes (nvfp4 on Ada and Hopper, Triton 3.6) or multiplies in bf16
in silence (mxfp8), so both are refused. A CPU computes with the same rounded numbers, which is right and slow: the
quality of a recipe can be judged on any machine. On GPUs nothing of this was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.machinery.quantization.layers import ONE_ROW, matches_any
from vivace.machinery.quantization.scheme import Scheme, SchemeSettings
from vivace.machinery.quantization.torchao_tensors import PACKAGE, with_weight

if TYPE_CHECKING:
    import torch

_CAPABILITIES = ((10, 0), (10, 3), (12, 0))
"""Not 12.1, DGX Spark's, for which Triton 3.6 multiplies mxfp8 in bf16 and cannot compile nvfp4."""
_EIGHT_BITS = (*ONE_ROW, "*modulation*", "*_mod", "*adaLN*")
"""Layers that `nvfp4` stores in MXFP8: with one row per image four bits save no time, and all channels depend on that
row."""
_COLUMNS, _ROWS = 32, 16
"""Multiples of input and output channels that cuBLASLt requires."""


def _nvfp4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    from vivace.machinery.quantization.block_tensors import mxfp8_weight, nvfp4_weight

    if matches_any(settings.layer_name, _EIGHT_BITS):
        return with_weight(layer, mxfp8_weight(layer.weight))
    return with_weight(layer, nvfp4_weight(layer.weight, settings.rank))


def _mxfp8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    from vivace.machinery.quantization.block_tensors import mxfp8_weight

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
    return (
        f"rank={settings.rank} is no less than half of {rows}x{columns}"
        if _is_wide(layer, settings)
        else None
    )


def _is_wide(layer: torch.nn.Module, settings: SchemeSettings) -> bool:
    """Whether the low-rank branch would take more work than the layer does in 16 bits."""
    return bool(2 * settings.rank >= min(layer.weight.shape))


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
