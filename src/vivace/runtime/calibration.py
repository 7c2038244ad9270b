"""Fits that a technique needs and that are made once for a model: TeaCache's polynomial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import OutputError, Unsupported, UsageError
from vivace.models.find import Found
from vivace.runtime.session import open_session
from vivace.spec.technique import component_of
from vivace.techniques.resolve import resolve
from vivace.techniques.teacache import not_flux, watching
from vivace.techniques.teacache_fit import Fit, fitted, keep


@dataclass(frozen=True)
class Calibrated:
    """A fit and where it is kept."""

    fit: Fit
    file: Path


def calibrate_teacache(
    found: Found,
    device: str,
    prompts: Sequence[str],
    *,
    num_pictures: int = 8,
    degree: int = 4,
    call: dict[str, Any] | None = None,
    tell: Callable[[int], None] = lambda drawn: None,
) -> Calibrated:
    """Draw with the model as published, fit TeaCache's polynomial to what was seen, and keep it for this model.

    Args:
        prompts: drawn by turns, with seeds 0, 1, ...
        call: size, steps and guidance, where they are not the model's own.
        tell: called after each picture with how many there are.

    Raises:
        Unsupported: no FLUX, or random weights.
        UsageError: too few steps or pictures for the degree.
        OutputError: the fit cannot be kept.
    """
    import torch

    if found.model.is_synthetic:
        raise Unsupported(
            f"teacache: {found.model.name} has random weights, so there is nothing to fit; it takes teacache(hits=0.5)"
        )
    session = open_session(found, resolve("baseline"), device, call, prompts)
    transformer = component_of(session.pipe, "denoiser")
    if (reason := not_flux(transformer)) is not None:
        raise Unsupported(f"teacache: {reason}")
    with watching(transformer) as (changes, start_picture):
        for k in range(num_pictures):
            start_picture()
            session(prompts[k % len(prompts)], generator=torch.Generator("cpu").manual_seed(k))
            tell(k + 1)
    model = f"{found.model.name}@{found.model.revision}"
    try:
        fit = fitted(changes, degree, model, int(session.pipe.num_timesteps))
    except ValueError as error:
        raise UsageError(f"teacache: {error}; give more --pictures or --num-inference-steps") from None
    try:
        return Calibrated(fit, keep(fit, transformer))
    except OSError as error:
        raise OutputError(
            f"the fit cannot be kept: {error.filename}: {error.strerror}; set VIVACE_CACHE"
        ) from None
