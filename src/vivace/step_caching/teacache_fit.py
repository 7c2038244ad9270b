"""What a change of FLUX's modulated first input means for its output: polynomials, published or fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivace.step_caching import model_fits

_KIND = "teacache"


@dataclass(frozen=True)
class Fit:
    """A polynomial from the relative change of the modulated input to that of the output, between two steps.

    coefficients: the highest power's first.
    model: what it was fitted on, NAME@REVISION.
    low, high: the changes of the input that were seen. Outside of them the polynomial says nothing: below, the value at
        `low` is taken, above, that at `high` grows in proportion. Published ones do not say; theirs is taken as it is.
    num_pairs: pairs of steps.
    num_steps: of a picture.
    residual: the root mean square of what the polynomial misses, in relative changes of the output.
    explained: the share of the variance that it explains.
    source: where it is published, "" if it was fitted here.
    """

    coefficients: tuple[float, ...]
    model: str
    low: float = 0.0
    high: float = math.inf
    num_pairs: int = 0
    num_steps: int = 0
    residual: float = 0.0
    explained: float = 0.0
    source: str = ""

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def rescaled(self, change: float) -> float:
        """The output's change, never below 0."""
        seen = min(max(change, self.low), self.high)
        value = 0.0
        for coefficient in self.coefficients:
            value = value * seen + coefficient
        beyond = change / self.high if change > self.high else 1.0
        return max(0.0, value * beyond)

    def about(self) -> str:
        return self.source or f"degree {self.degree}, fitted on {self.model}"


FLUX_DEV = Fit(
    (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01),
    model="FLUX.1 [dev]",
    source="published for FLUX.1 [dev] (TeaCache4FLUX)",
)


def fitted(changes: Sequence[tuple[float, float]], degree: int, model: str, num_steps: int) -> Fit:
    """The least squares polynomial through (change of the input, change of the output).

    Raises:
        ValueError: fewer pairs than it takes to tell a fit from an interpolation, or numbers that are not finite.
    """
    import numpy as np

    if len(changes) < 2 * (degree + 1):
        raise ValueError(
            f"{len(changes)} pairs of steps are too few for a polynomial of degree {degree}; "
            f"{2 * (degree + 1)} at least are wanted"
        )
    x, y = np.asarray(changes, dtype=np.float64).T
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("the model's values are not finite")
    coefficients = np.polyfit(x, y, degree)
    missed = y - np.polyval(coefficients, x)
    spread = float(((y - y.mean()) ** 2).mean())
    square = float((missed**2).mean())
    return Fit(
        coefficients=tuple(float(c) for c in coefficients),
        model=model,
        low=float(x.min()),
        high=float(x.max()),
        num_pairs=len(changes),
        num_steps=num_steps,
        residual=math.sqrt(square),
        explained=1 - square / spread if spread else 1.0,
    )


def find_fit(transformer: Any, model: str) -> Fit | None:
    """What was fitted for this model, else what is published for its architecture, else None; see `model_fits.find`."""
    found = model_fits.find(_KIND, transformer, model)
    if found is not None:
        try:
            return Fit(**found | {"coefficients": tuple(float(c) for c in found["coefficients"])})
        except (KeyError, TypeError, ValueError):  # another version's
            return None
    return FLUX_DEV if model_fits.is_flux_dev(transformer) else None


def keep(fit: Fit, transformer: Any) -> Path:
    """Write a fit where `find_fit` finds it.

    Raises:
        OSError: it cannot be written.
    """
    return model_fits.keep(_KIND, transformer, fit.model, asdict(fit))
