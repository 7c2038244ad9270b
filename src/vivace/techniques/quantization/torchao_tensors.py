"""How torchao's schemes put a quantised weight into a layer, and a check that several of them share.

Every configuration is told `set_inductor_config=False`: torchao's default changes inductor's settings for the whole
process, and with them whatever is measured after.
"""

from __future__ import annotations

from typing import Any

PACKAGE = ("torchao", "torchao")


def quantize(layer: Any, config: Any) -> Any:
    from torchao.quantization import quantize_

    quantize_(layer, config, filter_fn=lambda module, name: module is layer)
    return layer


def with_weight(layer: Any, weight: Any) -> Any:
    import torch

    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def not_a_multiple(layer: Any, size: int) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if rows % size == 0 and columns % size == 0 else f"{rows}x{columns} is no multiple of {size}"
