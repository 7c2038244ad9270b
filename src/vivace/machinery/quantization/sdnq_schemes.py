"""SDNQ's schemes, which replace Linear and convolution layers by the library's own. An optional extra, under GPL-3.0.

Without `compile` its int8 is the fastest on FLUX.1 [dev]: 5.18 s an image on an H200, where torchao's int8 takes 6.65 s
for the same 21.9 GB (docs/techniques-measured.md); on SD 1.5 and SDXL it is slower than torchao's. It is the only
backend that stores convolutions in fp8 or in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vivace.machinery.quantization.scheme import (
    Scheme,
    SchemeSettings,
    TensorSpec,
    meta_layer,
    no_fp8_on_apple,
)

if TYPE_CHECKING:
    import torch

_PACKAGE = ("sdnq", "sdnq")
_GROUP = 64  # weights that share a scale in uint4
_MIN_CHANNELS = 32  # SDNQ skips layers of fewer channels


def _convert(kind: str) -> Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module]:
    def convert(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
        from sdnq import SDNQConfig
        from sdnq.quantizer import sdnq_quantize_layer

        # vivace has chosen the layers, so SDNQ's own lists and thresholds are off.
        config = SDNQConfig(
            weights_dtype=kind,
            quant_conv=True,
            add_skip_keys=False,
            minimum_allowed_numel=0,
            minimum_allowed_channel_size=0,
        )
        made, _ = sdnq_quantize_layer(layer, config, torch_dtype=layer.weight.dtype)
        return made

    return convert


def _describe(kind: str) -> Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module]:
    def describe(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
        return meta_layer(layer, *_tensors(layer, kind))

    return describe


def _tensors(layer: torch.nn.Module, kind: str) -> list[TensorSpec]:
    """Return the weights, and scales per output row and position of a convolution, or per group in uint4."""
    import torch

    shape, num = tuple(layer.weight.shape), layer.weight.numel()
    positions = num // (shape[0] * shape[1])
    if kind == "uint4":
        groups = (shape[0] * (shape[1] // _GROUP) * positions,)
        return [((num // 2,), torch.uint8), (groups, torch.float32), (groups, torch.float32)]
    stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return [(shape, stored), ((shape[0] * positions,), torch.float32)]


def _skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if min(rows, columns) >= _MIN_CHANNELS else f"fewer than {_MIN_CHANNELS} channels"


def _uint4_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    columns = layer.weight.shape[1]
    reason = None if columns % _GROUP == 0 else f"{columns} inputs are not a multiple of {_GROUP}"
    return _skips(layer, name, settings) or reason


SDNQ: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "as before",
        _convert("int8"),
        _describe("int8"),
        _skips,
        takes_convolutions=True,
        cannot_be_cast=True,
    ),
    "fp8_weight": Scheme(
        _PACKAGE,
        "in fp8 (e4m3), a scale per output row",
        "as before",
        _convert("float8_e4m3fn"),
        _describe("float8_e4m3fn"),
        _skips,
        unsupported=no_fp8_on_apple,
        takes_convolutions=True,
        cannot_be_cast=True,
    ),
    "int4": Scheme(
        _PACKAGE,
        f"in 4 bits, a scale and a zero per {_GROUP} weights",
        "as before",
        _convert("uint4"),
        _describe("uint4"),
        _uint4_skips,
        takes_convolutions=True,
        cannot_be_cast=True,
    ),
}
