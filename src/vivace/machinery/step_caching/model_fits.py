"""What step caches are told of a model: TeaCache's polynomial, MagCache's ratios. Measured once per model, and stored.

Each file holds one fit as JSON, named by the model and its architecture, in a folder per technique inside vivace's
cache. A file may be deleted; the fit is then to be made again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vivace.architectures import family_of
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder
from vivace.machinery.step_caching.block_residual import telling_calls_apart, watching_modulated
from vivace.machinery.step_caching.engine import relative_change

if TYPE_CHECKING:
    import torch

_VERSION = 1


@dataclass(frozen=True)
class Ratios:
    """MagCache's table: the magnitude of each step's residual by that of the step before; the first step's is 1.

    `spread` is the standard deviation of a ratio between images, of the step where it is largest; `source` is where it
    is published, "" if it was measured here.
    """

    technique: ClassVar[str] = "magcache"
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


@dataclass(frozen=True)
class Fit:
    """TeaCache's polynomial, from the relative change of the modulated input between two steps to that of the output.

    Attributes:
        coefficients: from the highest power down.
        low, high: the range of measured input changes: below, the value at `low` is taken; above, that at `high` grows
            in proportion. Published polynomials are taken as they are.
        residual, explained: the root mean square of the fit's error, and the share of the variance that it explains.
        source: where it is published, "" if it was fitted here.
    """

    technique: ClassVar[str] = "teacache"
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


AnyFit = TypeVar("AnyFit", Fit, Ratios)


def find_fit(kind: type[AnyFit], denoiser: Any, model: str) -> AnyFit | None:
    """Return the fit that `keep` wrote for this model ("": the latest of its architecture), else the published one."""
    architecture = _architecture(denoiser)
    if model:
        return _read(kind, _file(kind.technique, architecture, model)) or _published(kind, denoiser)
    try:
        files = sorted(
            (cache_folder() / kind.technique).glob(f"{architecture}-*.json"),
            key=lambda file: file.stat().st_mtime,
        )
    except OSError:
        files = []
    fits = (_read(kind, file) for file in reversed(files))
    return next((fit for fit in fits if fit is not None), None) or _published(kind, denoiser)


def keep(fit: Fit | Ratios, denoiser: Any) -> Path:
    """Write a fit atomically, where `find_fit` looks for it; OutputError where it cannot be written."""
    file = _file(fit.technique, _architecture(denoiser), fit.model)
    replace(file, json.dumps({"version": _VERSION, "model": fit.model, "fit": asdict(fit)}).encode())
    return file


def _published(kind: type[AnyFit], denoiser: Any) -> AnyFit | None:
    family = family_of(denoiser)
    published = None if family is None else family.cache_fits.get(kind.technique)
    if published is None or any(denoiser.config.get(k) != value for k, value in published.config.items()):
        return None
    return kind(published.values(), model=published.model, source=published.source)


@contextmanager
def watching_changes(transformer: Any) -> Iterator[tuple[list[tuple[float, float]], Callable[[], None]]]:
    """Collect relative changes of (modulated input, output) between calls; also yield what to call before each
    image."""
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
    """Fit the least squares polynomial to (input's, output's change); ValueError: too few pairs, or not finite."""
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


def ratios_of(residuals: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Return the table of one image by its residuals (batch, tokens, channels); ValueError: one step, or not finite."""
    if len(residuals) < 2:
        raise ValueError("an image of one step has nothing that could be skipped")
    ratios = (1.0, *(_ratio(new, old) for old, new in pairwise(residuals)))
    if not all(map(math.isfinite, ratios)):
        raise ValueError("the model's values are not finite")
    return ratios


def mean_of(tables: Sequence[Sequence[float]], model: str) -> Ratios:
    import numpy as np

    stacked = np.asarray(tables)
    mean, spread = stacked.mean(axis=0), stacked.std(axis=0)
    return Ratios(tuple(float(r) for r in mean), model, float(spread.max()), len(tables))


def _ratio(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new.float().norm(dim=-1) / (old.float().norm(dim=-1) + 1e-8)).mean())


def _architecture(denoiser: Any) -> str:
    config = {name: value for name, value in denoiser.config.items() if not name.startswith("_")}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _file(technique: str, architecture: str, model: str) -> Path:
    name = f"{architecture}-{hashlib.sha256(model.encode()).hexdigest()[:16]}.json"
    return cache_folder() / technique / name


def _read(kind: type[AnyFit], file: Path) -> AnyFit | None:
    first = fields(kind)[0].name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            return None
        fit = content["fit"]
        return kind(**fit | {first: tuple(float(value) for value in fit[first])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
