"""What some step caches need to know of a model, found out once: TeaCache's polynomial, MagCache's ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vivace.contract import component_of
from vivace.errors import OutputError, Unsupported, UsageError
from vivace.models.find import Found
from vivace.recipes.resolve import resolve
from vivace.runtime.session import Session, open_session
from vivace.step_caching import magcache_ratios, teacache_fit
from vivace.step_caching.flux_residual import not_flux, watching_residuals
from vivace.step_caching.magcache_ratios import Ratios
from vivace.step_caching.teacache_fit import Fit
from vivace.techniques.teacache import watching

Tell = Callable[[int], None]
"""Called after each picture with how many there are."""


def calibrate_teacache(
    found: Found,
    device: str,
    prompts: Sequence[str],
    *,
    num_pictures: int = 8,
    degree: int = 4,
    call: dict[str, Any] | None = None,
    tell: Tell = lambda drawn: None,
) -> tuple[Fit, Path]:
    """Draw with the model as published, fit TeaCache's polynomial to what was seen, and keep it for this model.

    Args:
        prompts: drawn by turns, with seeds 0, 1, ...
        call: size, steps and guidance, where they are not the model's own.

    Returns:
        The fit, and the file that it is kept in.

    Raises:
        Unsupported: no FLUX, or random weights.
        UsageError: too few steps or pictures for the degree.
        OutputError: the fit cannot be kept.
    """
    session = _open("teacache", found, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    with watching(transformer) as (changes, start_picture):
        for k in range(num_pictures):
            start_picture()
            _draw(session, prompts, k)
            tell(k + 1)
    try:
        fit = teacache_fit.fitted(changes, degree, _name(found), int(session.pipe.num_timesteps))
    except ValueError as error:
        raise UsageError(f"teacache: {error}; give more --pictures or --num-inference-steps") from None
    return fit, _kept(lambda: teacache_fit.keep(fit, transformer))


def calibrate_magcache(
    found: Found,
    device: str,
    prompts: Sequence[str],
    *,
    num_pictures: int = 8,
    call: dict[str, Any] | None = None,
    tell: Tell = lambda drawn: None,
) -> tuple[Ratios, Path]:
    """As `calibrate_teacache`, for MagCache's table of ratios."""
    session = _open("magcache", found, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    tables: list[tuple[float, ...]] = []
    for k in range(num_pictures):
        with watching_residuals(transformer) as residuals:
            _draw(session, prompts, k)
        try:
            tables.append(magcache_ratios.growth(residuals))
        except ValueError as error:
            raise UsageError(f"magcache: {error}; give another --num-inference-steps") from None
        tell(k + 1)
    ratios = magcache_ratios.mean_of(tables, _name(found))
    return ratios, _kept(lambda: magcache_ratios.keep(ratios, transformer))


def _open(
    technique: str, found: Found, device: str, prompts: Sequence[str], call: dict[str, Any] | None
) -> Session:
    if found.model.is_synthetic:
        raise Unsupported(
            f"{technique}: {found.model.name} has random weights, so there is nothing to learn of it; "
            f"it takes {technique}(hits=0.5)"
        )
    session = open_session(found, resolve("baseline"), device, call, prompts)
    if (reason := not_flux(component_of(session.pipe, "denoiser"))) is not None:
        raise Unsupported(f"{technique}: {reason}")
    return session


def _draw(session: Session, prompts: Sequence[str], k: int) -> None:
    import torch

    session(prompts[k % len(prompts)], generator=torch.Generator("cpu").manual_seed(k))


def _name(found: Found) -> str:
    return f"{found.model.name}@{found.model.revision}"


def _kept(keep: Callable[[], Path]) -> Path:
    try:
        return keep()
    except OSError as error:
        raise OutputError(
            f"what was found cannot be kept: {error.filename}: {error.strerror}; set VIVACE_CACHE to a folder"
        ) from None
