"""A scheme: the layers that it takes, and their replacements. One entry per scheme, in its backend's table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vivace.machinery.technique import Machine

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SchemeSettings:
    """The knobs that schemes read, the machine, and of the layer that is converted the name and, for a scheme that
    `is_calibrated`, the scale of its inputs. `rank` is the low-rank branch's; 0: none."""

    machine: Machine
    granularity: Literal["row", "tensor"] = "row"
    convolutions: bool = False
    double_quantization: bool = True
    rank: int = 0
    rotation: Literal["none", "hadamard"] = "none"
    layer_name: str = ""
    input_scale: torch.Tensor | None = None


def no_fp8_on_apple(settings: SchemeSettings) -> str | None:
    if settings.machine.backend == "mps":
        return "PyTorch has no fp8 on Apple's GPUs; int8 stores weights in eight bits too"
    return None


@dataclass(frozen=True)
class Scheme:
    """One way to store the weights of a layer in fewer bits.

    package: the module to import, and what to `pip install` where it is missing.
    weights, matmuls: how weights are stored, and what matmuls are computed in.
    convert: turns a Linear, or a Conv2d where `takes_convolutions`, into its replacement.
    describe: the same for a layer on the meta device: one of the same tensors, whose call allocates as much. None:
        `convert` works there too.
    skips: why a layer stays as it is, or None. Asked before any layer is converted; looks at shapes and dtypes only.
    unsupported: why this machine or installation cannot run it, or None.
    has_tensor_scales, has_single_scales, has_low_rank: knows granularity=tensor, double_quantization=False, rank.
    cannot_be_cast: fails when cast to another precision later, as pipelines do with a VAE in fp16.
    reports_storage_dtype: its weights report the dtype of the stored bytes; layers whose model reads that are skipped.
    is_calibrated: the scale of a layer's inputs is fixed beforehand, from a few generated images.
    emulated_on: devices ("cpu") on which its matmuls are computed in fp32 of the same rounded numbers.
    """

    package: tuple[str, str]
    weights: str
    matmuls: str
    convert: Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module]
    describe: Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module] | None = None
    skips: Callable[[torch.nn.Module, str, SchemeSettings], str | None] = lambda *_: None
    unsupported: Callable[[SchemeSettings], str | None] = lambda _: None
    takes_convolutions: bool = False
    has_tensor_scales: bool = False
    has_single_scales: bool = False
    cannot_be_cast: bool = False
    reports_storage_dtype: bool = False
    is_calibrated: bool = False
    has_low_rank: bool = False
    has_rotation: bool = False
    emulated_on: tuple[str, ...] = ()


TensorSpec: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
"""Shape and dtype."""


def meta_layer(layer: torch.nn.Module, *tensors: TensorSpec, dequantises: bool = True) -> torch.nn.Module:
    """Return a layer that holds these tensors, the weights first, and whose call allocates what the quantised one's
    does."""
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
