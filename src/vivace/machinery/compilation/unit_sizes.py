"""Code for any size of an image, traced without nested divisions of its height and width."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def takes_a_sample(part: torch.nn.Module) -> bool:
    """Whether the first input is named `sample`, (batch, channels, height, width), as in diffusers' UNets and VAEs."""
    return next(iter(inspect.signature(part.forward).parameters), None) == "sample"


def compiled_by_units(part: torch.nn.Module, *, any_size: bool, **options: Any) -> Callable[..., Any]:
    """Return the compiled forward of a UNet or a part of a VAE, which passes `sample` to torch.compile in units.

    A UNet halves its size at each level. With height and width as symbols its shapes are nested divisions, which sympy
    simplifies again and again: inductor takes three times as long as for one size. So the symbols count units of
    2^levels: half of 8 k is 4 k. Sizes that are no multiple of the unit have code of their own, traced the long way; a
    UNet interpolates at such sizes.

    Args:
        any_size: make height and width symbols from the first size on, and nothing else. Otherwise the first size has
            code of its own, and torch.compile makes symbols of changing sizes.
        options: of torch.compile, without `dynamic`.
    """
    import torch

    # By the attribute: a UNet can have one size on several levels. A VAE has none, and its decoder only enlarges.
    unit = 2 ** getattr(part, "num_upsamplers", 0)
    eager = part.forward
    of_any_size = torch.compile(eager, **options)

    def from_units(units: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """units: (batch, channels, height / unit, unit, width / unit, unit)."""
        return eager(units.flatten(4, 5).flatten(2, 3), *args, **kwargs)

    of_whole_units = torch.compile(from_units, **options)

    @functools.wraps(eager)
    def forward(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if unit > 1 and sample.ndim == 4 and not any(size % unit for size in sample.shape[2:]):
            units = sample.unflatten(3, (-1, unit)).unflatten(2, (-1, unit))
            if any_size:
                _mark_dynamic(units, (2, 4))
            return of_whole_units(units, *args, **kwargs)
        if any_size:
            _mark_dynamic(sample, range(2, sample.ndim))
        return of_any_size(sample, *args, **kwargs)

    return forward


def _mark_dynamic(tensor: torch.Tensor, dims: tuple[int, ...] | range) -> None:
    import torch

    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
