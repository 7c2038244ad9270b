"""Witnesses of quality that need no model and react first when a decoder, a scale or a dtype is wrong.

    sharpness    variance of the Laplacian of the luminance (see `measure.image_metrics`); a blurring decoder lowers it
    contrast     standard deviation of the luminance
    saturation   mean of max(R, G, B) - min(R, G, B)
    brightness   mean luminance
    noise        standard deviation of the noise in the calmest tenth of the image's blocks, in grey levels
                 (Immerkaer 1996, Fast noise variance estimation: the difference of two Laplacians)

The first three are compared as ratios, the last two as differences. The margins are differences visible side by side,
wide enough that another seed's images of the same prompts stay within them on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vivace.measure.image_metrics import Pixels, luminance, sharpness

_LEAST = {"sharpness": 1.0, "contrast": 1.0, "saturation": 1.0}
"""Added to both values of a ratio, so that flat and grey images have one."""
_BLOCK = 8  # pixels
_CALM = 0.1  # share of the blocks
_GAIN = 6.0  # standard deviation of the difference of two Laplacians, for white noise of 1


@dataclass(frozen=True)
class ImageWitness:
    """A figure of an image, with the margin for its mean.

    Attributes:
        margin: of the logarithm of the ratio, or of the difference.
        worse: the direction that is worse.
        lower, higher: words for an image with a lower or higher value.
    """

    name: str
    is_ratio: bool
    margin: float
    worse: Literal["lower", "higher", "either"]
    lower: str
    higher: str

    def difference(self, a: float, b: float) -> float:
        """Return the distance of B's value from A's, on the scale of the margin."""
        if not self.is_ratio:
            return b - a
        least = _LEAST[self.name]
        return math.log((b + least) / (a + least))

    @property
    def margin_in_words(self) -> str:
        if not self.is_ratio:
            return f"±{self.margin:g}"
        return f"×{math.exp(-self.margin):.2f} to ×{math.exp(self.margin):.2f}"

    def in_words(self, difference: float) -> str:
        """Return a difference as printed: a ratio, or a signed number."""
        return f"×{math.exp(difference):.2f}" if self.is_ratio else f"{difference:+.1f}"


WITNESSES = (
    ImageWitness("sharpness", True, math.log(1.5), "lower", "softer", "sharper"),
    ImageWitness("contrast", True, math.log(1.25), "either", "flatter", "harsher"),
    ImageWitness("saturation", True, math.log(1.25), "either", "paler", "more colourful"),
    ImageWitness("brightness", False, 12.0, "either", "darker", "brighter"),
    ImageWitness("noise", False, 2.0, "higher", "cleaner", "noisier"),
)


def statistics_of(image: Pixels) -> dict[str, float]:
    """Return the figures of an image (H, W, 3), 0 to 255, by the names of `WITNESSES`; empty if it is not finite."""
    if not np.isfinite(image).all():
        return {}
    light = luminance(image)
    return {
        "sharpness": sharpness(image),
        "contrast": float(light.std()),
        "saturation": float((image.max(axis=-1) - image.min(axis=-1)).mean()),
        "brightness": float(light.mean()),
        "noise": noise(light),
    }


def noise(light: NDArray[np.float64]) -> float:
    """Return the standard deviation of the noise of a luminance (H, W), where the image is calm.

    Blocks of one exact colour do not count: a drawn background has no noise to measure, however noisy the rest is.
    """
    padded = np.pad(light, 1, mode="reflect")
    rows = padded[:-2] - 2 * padded[1:-1] + padded[2:]
    doubled = rows[:, :-2] - 2 * rows[:, 1:-1] + rows[:, 2:]
    height, width = (side // _BLOCK * _BLOCK for side in doubled.shape)
    if not height or not width:
        return 0.0
    blocks = doubled[:height, :width].reshape(height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK)
    deviations = np.sort(np.sqrt((blocks**2).mean(axis=(1, 3))).ravel()) / _GAIN
    return float(deviations[: max(1, round(_CALM * deviations.size))].mean())
