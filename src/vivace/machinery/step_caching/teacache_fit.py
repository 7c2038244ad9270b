"""TeaCache's polynomials: how far the output changes with the modulated first input. Fitted here, and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivace.machinery.step_caching import model_fits
from vivace.machinery.step_caching.block_residual import telling_calls_apart, watching_modulated
from vivace.machinery.step_caching.cache_state import relative_change

_KIND = "teacache"


@dataclass(frozen=True)
class Fit:
    """A polynomial from the relative change of the modulated input between two steps to that of the output.

    Attributes:
        coefficients: from the highest power down.
        model: what it was fitted on, NAME@REVISION.
        low, high: the range of the measured input changes. Outside of it the polynomial says nothing: below, the value
            at `low` is taken; above, the value at `high` grows in proportion. Published polynomials name no range and
            are taken as they are.
        num_pairs: pairs of steps.
        num_steps: per image.
        residual: the root mean square of the fit's error, in relative changes of the output.
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
        """Return the output's change, never below 0."""
        clamped = min(max(change, self.low), self.high)
        value = 0.0
        for coefficient in self.coefficients:
            value = value * clamped + coefficient
        beyond = change / self.high if change > self.high else 1.0
        return max(0.0, value * beyond)

    def about(self) -> str:
        return self.source or f"degree {self.degree}, fitted on {self.model}"


@contextmanager
def watching_changes(transformer: Any) -> Iterator[tuple[list[tuple[float, float]], Callable[[], None]]]:
    """Collect how the output changes with the modulated input, for a fit.

    Yields:
        The relative changes of (modulated input, output) between consecutive calls, a list that grows with each call;
        and a function to call before each image.
    """
    changes: list[tuple[float, float]] = []
    last: dict[str, tuple[Any, Any]] = {}

    with watching_modulated(transformer) as modulated, telling_calls_apart(transformer) as kind:

        def finishes(_: Any, __: Any, output: Any) -> None:
            now = modulated.pop(), _one(output[0] if isinstance(output, tuple) else output.sample).detach()
            if (before := last.get(kind())) is not None:
                changes.append((relative_change(now[0], before[0]), relative_change(now[1], before[1])))
            last[kind()] = now

        hook = transformer.register_forward_hook(finishes)
        try:
            yield changes, last.clear
        finally:
            hook.remove()


def _one(output: Any) -> Any:
    """Return the output as one tensor; Z-Image's is a list of one for each row."""
    import torch

    return torch.stack(output) if isinstance(output, list) else output


def fit_polynomial(changes: Sequence[tuple[float, float]], degree: int, model: str, num_steps: int) -> Fit:
    """Fit the least squares polynomial through (change of the input, change of the output).

    Raises:
        ValueError: fewer pairs than it takes to tell a fit from an interpolation, or numbers that are not finite.
    """
    import numpy as np

    if len(changes) < 2 * (degree + 1):
        raise ValueError(
            f"{len(changes)} pairs of steps are too few for a polynomial of degree {degree}, "
            f"which needs at least {2 * (degree + 1)}"
        )
    x, y = np.asarray(changes, dtype=np.float64).T
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("the model's values are not finite")
    coefficients = np.polyfit(x, y, degree)
    error = y - np.polyval(coefficients, x)
    variance = float(((y - y.mean()) ** 2).mean())
    square = float((error**2).mean())
    return Fit(
        coefficients=tuple(float(c) for c in coefficients),
        model=model,
        low=float(x.min()),
        high=float(x.max()),
        num_pairs=len(changes),
        num_steps=num_steps,
        residual=math.sqrt(square),
        explained=1 - square / variance if variance else 1.0,
    )


def kept_fit(transformer: Any, model: str) -> Fit | None:
    """Return the fit that `keep` wrote for this model, or None; see `model_fits.find`."""
    fit = model_fits.find(_KIND, transformer, model)
    if fit is None:
        return None
    try:
        return Fit(**fit | {"coefficients": tuple(float(c) for c in fit["coefficients"])})
    except (KeyError, TypeError, ValueError):  # another version's
        return None


def keep(fit: Fit, transformer: Any) -> Path:
    """Write a fit where `kept_fit` looks for it.

    Raises:
        OSError: it cannot be written.
    """
    return model_fits.keep(_KIND, transformer, fit.model, asdict(fit))
