"""What stands for a quantised layer where there are shapes alone, and its library cannot do without values."""

from __future__ import annotations

import functools
from typing import Any

Part = tuple[tuple[int, ...], Any]
"""Shape and dtype of a tensor."""


def held(layer: Any, *parts: Part, widens: bool = True) -> Any:
    """A layer that holds what the quantised one would, and takes what its call would take.

    Args:
        layer: a Linear or Conv2d on the meta device.
        parts: the tensors that are held, the weights first.
        widens: the weight is there in full precision while the layer is called.
    """
    import torch

    if isinstance(layer, torch.nn.Conv2d):
        product: Any = functools.partial(
            torch.nn.functional.conv2d,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
        )
    else:
        product = torch.nn.functional.linear if widens else _narrow
    # The layer itself must not be held: its weights are what is saved.
    made = _held_class()(tuple(layer.weight.shape), layer.bias, product, widens)
    tensors = [torch.empty(shape, dtype=dtype, device=layer.weight.device) for shape, dtype in parts]
    made.weight = torch.nn.Parameter(tensors[0], requires_grad=False)
    made.scales = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in tensors[1:])
    return made


@functools.cache
def _held_class() -> Any:
    import torch

    class Held(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, shape: tuple[int, ...], bias: Any, product: Any, widens: bool) -> None:
            super().__init__()
            self.bias = bias
            self._shape, self._product, self._widens = shape, product, widens

        def forward(self, inputs: Any) -> Any:
            weight = inputs.new_empty(self._shape) if self._widens else self._shape
            return self._product(inputs, weight, self.bias)

    return Held


def _narrow(inputs: Any, shape: tuple[int, int], bias: Any) -> Any:
    """A product that reads the weights as they are stored."""
    output = inputs.new_empty((*inputs.shape[:-1], shape[0]))
    return output if bias is None else output + bias
