"""How the residual of FLUX's blocks grows from step to step: tables, published or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vivace.step_caching import model_fits

_KIND = "magcache"


@dataclass(frozen=True)
class Ratios:
    """The magnitude of each step's residual over that of the step before; the first step's is 1.

    model: what it was measured on, NAME@REVISION.
    spread: by how much pictures differ in a ratio, the standard deviation, the worst of all steps.
    num_pictures: it was measured on.
    source: where it is published, "" if it was measured here.
    """

    ratios: tuple[float, ...]
    model: str
    spread: float = 0.0
    num_pictures: int = 0
    source: str = ""

    def at(self, step: int, num_steps: int) -> float:
        """A step's ratio in a picture of `num_steps`: that of the nearest place in the table."""
        if step >= num_steps:
            return 1.0
        last = len(self.ratios) - 1
        return self.ratios[last if num_steps == 1 else round(step * last / (num_steps - 1))]

    def about(self) -> str:
        return self.source or f"measured on {self.model}"


def growth(residuals: Sequence[Any]) -> tuple[float, ...]:
    """One picture's table.

    Args:
        residuals: (batch, tokens, channels) of its steps in order.

    Raises:
        ValueError: a single step, or values that are not finite.
    """
    if len(residuals) < 2:
        raise ValueError("a picture of one step has nothing that could be skipped")
    ratios = (1.0, *(_ratio(new, old) for old, new in pairwise(residuals)))
    if not all(map(math.isfinite, ratios)):
        raise ValueError("the model's values are not finite")
    return ratios


def mean_of(tables: Sequence[Sequence[float]], model: str) -> Ratios:
    """The mean table of several pictures of the same number of steps."""
    import numpy as np

    stacked = np.asarray(tables)
    mean, spread = stacked.mean(axis=0), stacked.std(axis=0)
    return Ratios(tuple(float(r) for r in mean), model, float(spread.max()), len(tables))


def _ratio(new: Any, old: Any) -> float:
    """The mean over tokens of the norm of the one over that of the other."""
    return float((new.float().norm(dim=-1) / (old.float().norm(dim=-1) + 1e-8)).mean())


def find_ratios(transformer: Any, model: str) -> Ratios | None:
    """What was measured for this model, else what is published for its architecture, else None; see
    `model_fits.find`."""
    found = model_fits.find(_KIND, transformer, model)
    if found is not None:
        try:
            return Ratios(**found | {"ratios": tuple(float(r) for r in found["ratios"])})
        except (KeyError, TypeError, ValueError):  # another version's
            return None
    if not model_fits.is_flux_dev(transformer):
        return None
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    return Ratios(
        tuple(float(r) for r in FLUX_MAG_RATIOS), "FLUX.1 [dev]", source="published for FLUX.1 (diffusers)"
    )


def keep(ratios: Ratios, transformer: Any) -> Path:
    """Write a table where `find_ratios` finds it.

    Raises:
        OSError: it cannot be written.
    """
    return model_fits.keep(_KIND, transformer, ratios.model, asdict(ratios))
