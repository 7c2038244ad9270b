"""Vectors of numbers as text, as records store them."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def packed(values: Iterable[float] | NDArray[np.float64]) -> str:
    """Return numbers as base64 of little-endian float16, an array row by row."""
    return base64.b64encode(np.asarray(values, dtype="<f2").tobytes()).decode("ascii")


def unpacked(text: str) -> NDArray[np.float64]:
    """Reverse `packed`, into a flat array."""
    return np.frombuffer(base64.b64decode(text), dtype="<f2").astype(np.float64)
