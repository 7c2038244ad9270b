"""Calibrate step caches for a model, once: TeaCache's polynomial, MagCache's ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import OutputError, Unsupported, UsageError
from vivace.machinery.step_caching.block_residual import unknown_blocks, watching_residuals
from vivace.machinery.step_caching.model_fits import (
    Fit,
    Ratios,
    fit_polynomial,
    keep,
    mean_of,
    ratios_of,
    watching_changes,
)
from vivace.machinery.technique import component_of
from vivace.models.find import LocatedModel
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import generators_of, prompts_of
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session

OnImage = Callable[[int], None]
"""Called after each image with the number of images so far."""


def calibrate_teacache(
    located: LocatedModel,
    device: str,
    prompts: Sequence[str],
    *,
    num_images: int = 8,
    degree: int = 4,
    call: dict[str, Any] | None = None,
    on_image: OnImage = lambda num_images: None,
) -> tuple[Fit, Path]:
    """Fit TeaCache's polynomial to images of the model as published, and save it for this model.

    Args:
        prompts: used in turn, with seeds 0, 1, ...
        num_images: images to generate.
        degree: of the polynomial.
        call: size, steps and guidance that differ from the model's own.
        on_image: called with 0 when the model is read, and after each image with the number of images so far.

    Returns:
        The fit, and the file that it is saved in.
    """
    session = _open("teacache", located, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    on_image(0)
    with watching_changes(transformer) as (changes, start_image):
        for k in range(num_images):
            start_image()
            _generate(session, prompts, k)
            on_image(k + 1)
    try:
        fit = fit_polynomial(changes, degree, _name(located), int(session.pipe.num_timesteps))
    except ValueError as error:
        raise UsageError(f"teacache: {error}; give more --images or --num-inference-steps") from None
    return fit, _saved(lambda: keep(fit, transformer))


def calibrate_magcache(
    located: LocatedModel,
    device: str,
    prompts: Sequence[str],
    *,
    num_images: int = 8,
    call: dict[str, Any] | None = None,
    on_image: OnImage = lambda num_images: None,
) -> tuple[Ratios, Path]:
    """Measure MagCache's table of ratios and save it for this model; see `calibrate_teacache`."""
    session = _open("magcache", located, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    on_image(0)
    tables: list[tuple[float, ...]] = []
    for k in range(num_images):
        with watching_residuals(transformer) as residuals:
            _generate(session, prompts, k)
        try:
            tables.append(ratios_of(residuals))
        except ValueError as error:
            raise UsageError(f"magcache: {error}; give another --num-inference-steps") from None
        on_image(k + 1)
    ratios = mean_of(tables, _name(located))
    return ratios, _saved(lambda: keep(ratios, transformer))


def _open(
    technique: str, located: LocatedModel, device: str, prompts: Sequence[str], call: dict[str, Any] | None
) -> Session:
    if located.model.is_synthetic:
        raise Unsupported(
            f"{technique}: {located.model.name} has random weights, so there is nothing to measure; "
            f"give a fixed schedule, {technique}(hits=0.5)"
        )
    session = open_session(located, resolve("baseline"), device, call, prompts)
    if (reason := unknown_blocks(component_of(session.pipe, "denoiser"))) is not None:
        raise Unsupported(f"{technique}: {reason}")
    return session


def _generate(session: Session, prompts: Sequence[str], k: int) -> None:
    call = [(k, prompts[k % len(prompts)], k)]
    session(**prompts_of(call), **generators_of(call))


def _name(located: LocatedModel) -> str:
    return f"{located.model.name}@{located.model.revision}"


def _saved(save: Callable[[], Path]) -> Path:
    try:
        return save()
    except OutputError as error:
        raise OutputError(f"the result is lost: {error}; set VIVACE_CACHE to a writable folder") from None
