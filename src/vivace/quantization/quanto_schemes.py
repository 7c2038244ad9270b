"""Quanto's schemes: its layers in the place of Linear and convolution ones. An optional extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.quantization.meta_weights import Part, held
from vivace.quantization.scheme import Scheme, Settings

_PACKAGE = ("optimum.quanto", "optimum-quanto")
_GROUP = 128  # weights that share a scale in int4


def _change(kind: str) -> Callable[[Any, Settings], Any]:
    def change(layer: Any, settings: Settings) -> Any:
        if not settings.has_data:
            return held(layer, *_parts(layer, kind))
        import torch
        from optimum import quanto

        made_of = quanto.QConv2d if isinstance(layer, torch.nn.Conv2d) else quanto.QLinear
        made = made_of.from_module(layer, weights=getattr(quanto, kind))
        made.freeze()
        return made.eval().requires_grad_(False)

    return change


def _parts(layer: Any, kind: str) -> list[Part]:
    import torch

    shape, dtype, num = tuple(layer.weight.shape), layer.weight.dtype, layer.weight.numel()
    if kind == "qint4":
        return [((num // 2,), torch.uint8), ((num // _GROUP,), dtype), ((num // _GROUP,), dtype)]
    stored = torch.int8 if kind == "qint8" else torch.float8_e4m3fn
    return [(shape, stored), ((shape[0],), dtype)]


def _int4_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    columns = layer.weight[0].numel()
    return None if columns % _GROUP == 0 else f"{columns} inputs are no multiple of {_GROUP}"


QUANTO: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "as before",
        _change("qint8"),
        takes_convolutions=True,
        keeps_dtype=True,
    ),
    "fp8_weight": Scheme(
        _PACKAGE,
        "in fp8 (e4m3), a scale per output row",
        "as before",
        _change("qfloat8_e4m3fn"),
        takes_convolutions=True,
        keeps_dtype=True,
    ),
    "int4": Scheme(
        _PACKAGE,
        f"in 4 bits, a scale and a zero per {_GROUP} weights",
        "as before",
        _change("qint4"),
        _int4_keeps,
        takes_convolutions=True,
        keeps_dtype=True,
    ),
}
