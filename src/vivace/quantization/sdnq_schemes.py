"""SDNQ's schemes: its layers in the place of Linear and convolution ones. An optional extra, under GPL-3.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.quantization.meta_weights import Part, held
from vivace.quantization.scheme import Scheme, Settings

_PACKAGE = ("sdnq", "sdnq")
_GROUP = 64  # weights that share a scale in uint4
_LEAST = 32  # SDNQ leaves layers of fewer channels alone


def _change(kind: str) -> Callable[[Any, Settings], Any]:
    def change(layer: Any, settings: Settings) -> Any:
        if not settings.has_data:
            return held(layer, *_parts(layer, kind))
        from sdnq import SDNQConfig
        from sdnq.quantizer import sdnq_quantize_layer

        # Which layers are taken has been decided here, so SDNQ's own lists and thresholds are off.
        config = SDNQConfig(
            weights_dtype=kind,
            quant_conv=True,
            add_skip_keys=False,
            minimum_allowed_numel=0,
            minimum_allowed_channel_size=0,
        )
        made, _ = sdnq_quantize_layer(layer, config, torch_dtype=layer.weight.dtype)
        return made

    return change


def _parts(layer: Any, kind: str) -> list[Part]:
    import torch

    shape, num = tuple(layer.weight.shape), layer.weight.numel()
    others = num // (shape[0] * shape[1])
    if kind == "uint4":
        groups = (shape[0] * (shape[1] // _GROUP) * others,)
        return [((num // 2,), torch.uint8), (groups, torch.float32), (groups, torch.float32)]
    stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return [(shape, stored), ((shape[0] * others,), torch.float32)]


def _keeps(layer: Any, name: str, settings: Settings) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if min(rows, columns) >= _LEAST else f"fewer than {_LEAST} channels"


def _uint4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    columns = layer.weight.shape[1]
    reason = None if columns % _GROUP == 0 else f"{columns} inputs are no multiple of {_GROUP}"
    return _keeps(layer, name, settings) or reason


SDNQ: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "as before",
        _change("int8"),
        _keeps,
        takes_convolutions=True,
        keeps_dtype=True,
    ),
    "fp8_weight": Scheme(
        _PACKAGE,
        "in fp8 (e4m3), a scale per output row",
        "as before",
        _change("float8_e4m3fn"),
        _keeps,
        takes_convolutions=True,
        keeps_dtype=True,
    ),
    "int4": Scheme(
        _PACKAGE,
        f"in 4 bits, a scale and a zero per {_GROUP} weights",
        "as before",
        _change("uint4"),
        _uint4_keeps,
        takes_convolutions=True,
        keeps_dtype=True,
    ),
}
