"""MagCache's tables: how the residual of FLUX's blocks grows from step to step. Measured here, and kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.machinery.step_caching import model_fits

if TYPE_CHECKING:
    import torch

_KIND = "magcache"


@dataclass(frozen=True)
class Ratios:
    """The magnitude of each step's residual, divided by that of the step before; the first step's is 1.

    Attributes:
        model: what it was measured on, NAME@REVISION.
        spread: the standard deviation of a ratio between images, of the step where it is largest.
        num_pictures: images that it was measured on.
        source: where it is published, "" if it was measured here.
    """

    ratios: tuple[float, ...]
    model: str
    spread: float = 0.0
    num_pictures: int = 0
    source: str = ""

    def at(self, step: int, num_steps: int) -> float:
        """Return a step's ratio in an image of `num_steps`: the nearest entry of the table."""
        if step >= num_steps:
            return 1.0
        last = len(self.ratios) - 1
        return self.ratios[last if num_steps == 1 else round(step * last / (num_steps - 1))]

    def about(self) -> str:
        return self.source or f"measured on {self.model}"


def ratios_of(residuals: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Return the table of one image.

    Args:
        residuals: (batch, tokens, channels) of its steps in order.

    Raises:
        ValueError: a single step, or values that are not finite.
    """
    if len(residuals) < 2:
        raise ValueError("an image of one step has nothing that could be skipped")
    ratios = (1.0, *(_ratio(new, old) for old, new in pairwise(residuals)))
    if not all(map(math.isfinite, ratios)):
        raise ValueError("the model's values are not finite")
    return ratios


def mean_of(tables: Sequence[Sequence[float]], model: str) -> Ratios:
    """Return the mean of several images' tables, all of the same number of steps."""
    import numpy as np

    stacked = np.asarray(tables)
    mean, spread = stacked.mean(axis=0), stacked.std(axis=0)
    return Ratios(tuple(float(r) for r in mean), model, float(spread.max()), len(tables))


def _ratio(new: torch.Tensor, old: torch.Tensor) -> float:
    """Return the mean over tokens of the ratio of their norms."""
    return float((new.float().norm(dim=-1) / (old.float().norm(dim=-1) + 1e-8)).mean())


def kept_ratios(transformer: Any, model: str) -> Ratios | None:
    """Return the table that `keep` wrote for this model, or None; see `model_fits.find`."""
    fit = model_fits.find(_KIND, transformer, model)
    if fit is None:
        return None
    try:
        return Ratios(**fit | {"ratios": tuple(float(r) for r in fit["ratios"])})
    except (KeyError, TypeError, ValueError):  # another version's
        return None


def keep(ratios: Ratios, transformer: Any) -> Path:
    """Write a table where `kept_ratios` looks for it.

    Raises:
        OSError: it cannot be written.
    """
    return model_fits.keep(_KIND, transformer, ratios.model, asdict(ratios))
