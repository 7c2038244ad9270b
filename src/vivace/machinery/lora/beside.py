"""Layers that have a LoRA beside them: their two matrices are buffers, and their class adds B A x to the output."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DOWN, UP = "vivace_lora_down", "vivace_lora_up"


def can_have_one(module: torch.nn.Module) -> bool:
    import torch

    if hasattr(module, "reserve_rank"):
        return True
    if "forward" in vars(module):  # replaced on the instance, which then never calls its class's
        return False
    if isinstance(module, torch.nn.Conv2d):
        return bool(module.groups == 1 and module.padding_mode == "zeros")
    return hasattr(module, "in_features") and hasattr(module, "out_features") and hasattr(module, "weight")


def reserve(denoiser: torch.nn.Module, layer: torch.nn.Module, rank: int) -> int:
    """Give a layer more rows; return the first of them."""
    import torch

    if hasattr(layer, "reserve_rank"):
        first_row: int = layer.reserve_rank(rank, denoiser.device)
        return first_row
    present = hasattr(layer, DOWN)
    is_convolution = isinstance(layer, torch.nn.Conv2d)
    inner = (layer.in_channels, *layer.kernel_size) if is_convolution else (layer.in_features,)
    outer = layer.out_channels if is_convolution else layer.out_features
    like = {"device": layer.weight.device, "dtype": _compute_dtype(layer, denoiser)}
    down, up = torch.zeros(rank, *inner, **like), torch.zeros(outer, rank, **like)
    first = 0
    if present:
        before = buffers(layer)
        first = len(before[0])
        down, up = torch.cat([before[0], down]), torch.cat([before[1], up], dim=1)
    else:
        kind: Any = type(layer)
        layer.__class__ = _with_lora(kind)
    layer.register_buffer(DOWN, down, persistent=False)
    layer.register_buffer(UP, up.contiguous(), persistent=False)
    return first


def _compute_dtype(layer: torch.nn.Module, denoiser: torch.nn.Module) -> torch.dtype:
    """Return the dtype that the layer computes in. A quantised weight may report that of its bytes."""

    def is_wide(dtype: Any) -> bool:
        return dtype is not None and dtype.is_floating_point and dtype.itemsize >= 2

    bias = getattr(layer, "bias", None)
    dtypes = (layer.weight.dtype, getattr(layer, "compute_dtype", None), getattr(bias, "dtype", None))
    for dtype in dtypes:
        if is_wide(dtype):
            return dtype
    kinds = Counter(p.dtype for p in denoiser.parameters() if is_wide(p.dtype))
    import torch

    return kinds.most_common(1)[0][0] if kinds else torch.float32


def buffers(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if hasattr(layer, "reserve_rank"):
        return layer.down, layer.up
    return getattr(layer, DOWN), getattr(layer, UP)


@functools.cache
def _with_lora(kind: Any) -> Any:
    """Return a class of layers like `kind` that add B A x to their output.

    A separate class, and no hook: torch.compile checks the classes of modules before it uses compiled code again, but
    not their hooks, and would run code of the same model without a LoRA.
    """
    import torch

    add = _convolution if issubclass(kind, torch.nn.Conv2d) else _linear

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = kind.forward(self, *args, **kwargs)
        return output + add(self, *args, **kwargs).to(output.dtype)

    def reduced(self: Any, _: Any) -> Any:
        return _without_init, (kind,), self.__dict__

    namespace = {"forward": forward, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), namespace)


def _without_init(kind: Any) -> Any:
    """Return a layer without its state, for pickle and `copy`."""
    made = _with_lora(kind)
    return made.__new__(made)


def _linear(layer: Any, input: torch.Tensor) -> torch.Tensor:
    import torch

    down, up = buffers(layer)
    return torch.nn.functional.linear(torch.nn.functional.linear(input.to(down.dtype), down), up)


def _convolution(layer: Any, input: torch.Tensor) -> torch.Tensor:
    import torch

    down, up = buffers(layer)
    conv2d = torch.nn.functional.conv2d
    inner = conv2d(input.to(down.dtype), down, None, layer.stride, layer.padding, layer.dilation)
    return conv2d(inner, up[:, :, None, None])
