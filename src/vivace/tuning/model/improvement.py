"""Expected improvement (Mockus, Tiesis and Zilinskas, The Application of Bayesian Methods, 1978)."""

from __future__ import annotations

import math

import numpy as np

from vivace.tuning.model.regression import Array


def improvement(mean: Array, sd: Array, best: float) -> Array:
    """Return the expected improvement over `best` of normally distributed values."""
    z = (mean - best) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    expected: Array = (mean - best) * normal(z) + sd * density
    return np.maximum(expected, 0.0)


def normal(z: Array) -> Array:
    return np.array([0.5 * (1 + math.erf(float(x) / math.sqrt(2))) for x in np.atleast_1d(z)])
