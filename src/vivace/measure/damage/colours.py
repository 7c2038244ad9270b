"""Damage to an image's colours and tones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vivace.measure.damage.details import resized
from vivace.measure.image_metrics import luminance

Pixels = NDArray[np.float64]


def banded(image: Pixels, step: float, _: object = None) -> Pixels:
    """Round each channel to multiples of a step, in grey levels."""
    return np.asarray(np.rint(image / step) * step)


def more_saturated(image: Pixels, percent: float, _: object = None) -> Pixels:
    return _with_saturation(image, 1 + percent / 100)


def less_saturated(image: Pixels, percent: float, _: object = None) -> Pixels:
    return _with_saturation(image, 1 - percent / 100)


def _with_saturation(image: Pixels, factor: float) -> Pixels:
    grey = luminance(image)[..., None]
    return np.asarray(grey + factor * (image - grey))


def cast(image: Pixels, levels: float, _: object = None) -> Pixels:
    """Add a number of grey levels of red and subtract as many of blue."""
    return image + levels * np.array([1.0, 0.0, -1.0])


def less_contrast(image: Pixels, percent: float, _: object = None) -> Pixels:
    """Move all colours towards the image's mean colour."""
    mean = image.mean(axis=(0, 1))
    return np.asarray(mean + (1 - percent / 100) * (image - mean))


def darker(image: Pixels, levels: float, _: object = None) -> Pixels:
    return image - levels


def coarse_chroma(image: Pixels, factor: float, _: object = None) -> Pixels:
    """Reduce the resolution of the colours by a factor; the luminance is kept."""
    height, width = image.shape[:2]
    grey = luminance(image)[..., None]
    chroma = resized(image - grey, round(height / factor), round(width / factor))
    coloured = grey + resized(chroma, height, width)
    return np.asarray(coloured + grey - luminance(coloured)[..., None])
