"""Quantised layers without values, for memory prediction on the meta device.

torchao's tensors can be made on the meta device, where tensors have shapes and no values. Other backends read the
values while they quantise. Their layers are described here instead, by the shapes and dtypes of their tensors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

TensorSpec: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
"""Shape and dtype."""


def meta_layer(layer: torch.nn.Module, *tensors: TensorSpec, dequantises: bool = True) -> torch.nn.Module:
    """Return a layer with the memory of the quantised one, whose call allocates as much.

    Args:
        layer: a Linear or Conv2d on the meta device.
        tensors: what the quantised layer holds, the weights first.
        dequantises: each call makes the weight in full precision first.
    """
    import torch

    if isinstance(layer, torch.nn.Conv2d):
        compute: Any = functools.partial(
            torch.nn.functional.conv2d,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
        )
    else:
        compute = torch.nn.functional.linear
    # Without a reference to the layer itself, whose weights would count as held.
    made = _meta_layer_class()(tuple(layer.weight.shape), layer.bias, compute, dequantises)
    empty = [torch.empty(shape, dtype=dtype, device=layer.weight.device) for shape, dtype in tensors]
    for name in layer.__constants__:  # such as in_features, which SDXL's pipeline reads
        setattr(made, name, getattr(layer, name))
    made.weight = torch.nn.Parameter(empty[0], requires_grad=False)
    made.scales = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in empty[1:])
    return made


@functools.cache
def _meta_layer_class() -> Any:
    import torch

    class MetaLayer(torch.nn.Module):  # type: ignore[misc]
        def __init__(
            self, shape: tuple[int, ...], bias: torch.Tensor | None, compute: Any, dequantises: bool
        ) -> None:
            super().__init__()
            self.bias = bias
            self._shape, self._compute, self._dequantises = shape, compute, dequantises

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # Matmuls that read the stored weights allocate none: one number replaces a matrix.
            weight = inputs.new_empty(self._shape if self._dequantises else ()).expand(self._shape)
            return self._compute(inputs, weight, self.bias)

    return MetaLayer
