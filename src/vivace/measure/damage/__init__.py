"""Damage such as acceleration causes, at graded strengths, to find the strength at which a witness detects it.

Each kind takes an image (H, W, 3) of 0 to 255, a strength in its own unit and a generator of random numbers, and
returns an image of the same size whose values are whole numbers from 0 to 255. Strengths grow: the first is at the edge
of what is visible side by side, the last is plain to see. A harmless change is one that no viewer would mind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivace.measure.damage import colours, details, places

Pixels = NDArray[np.float64]
Change = Callable[[Pixels, float, np.random.Generator], Pixels]


@dataclass(frozen=True)
class DamageKind:
    """A kind of damage.

    Attributes:
        like: the cause of such damage in accelerated drawing.
        unit: of the strengths.
    """

    name: str
    like: str
    unit: str
    strengths: tuple[float, ...]
    change: Change

    def apply(self, image: Pixels, strength: float, seed: int = 0) -> Pixels:
        """Return the damaged image. The same seed damages the same places."""
        return whole(self.change(image, strength, np.random.default_rng(seed)))

    def at(self, strength: float) -> str:
        """Return e.g. "blur of 1.5 px"."""
        return f"{self.name} of {strength:g} {self.unit}"


@dataclass(frozen=True)
class HarmlessChange:
    """A change that no viewer would notice or mind."""

    name: str
    change: Callable[[Pixels, np.random.Generator], Pixels]

    def apply(self, image: Pixels, seed: int = 0) -> Pixels:
        return whole(self.change(image, np.random.default_rng(seed)))


def whole(image: Pixels) -> Pixels:
    """Return the image in 8 bits."""
    return np.asarray(np.clip(np.rint(image), 0, 255))


SHIFT = "shift"
DAMAGE = (
    DamageKind("blur", "a small or wrong decoder", "px", (0.4, 0.6, 0.9, 1.5, 2.5), details.blurred),
    DamageKind(
        "lost resolution", "fewer tokens, smaller latents", "times", (1.25, 1.5, 2, 3, 4), details.reduced
    ),
    DamageKind(
        "coarse frequencies", "quantised weights", "levels", (4, 8, 16, 32, 64), details.frequencies_rounded
    ),
    DamageKind("noise", "too few steps", "levels", (1, 2, 4, 8, 16), details.noisy),
    DamageKind("halos", "too much guidance", "times", (0.1, 0.25, 0.5, 1, 2), details.sharpened),
    DamageKind("banding", "a coarse dtype", "levels", (2, 4, 8, 16, 32), colours.banded),
    DamageKind("more saturation", "too much guidance", "%", (5, 10, 20, 40, 80), colours.more_saturated),
    DamageKind("less saturation", "too little guidance", "%", (5, 10, 20, 40, 80), colours.less_saturated),
    DamageKind("colour cast", "a wrong scale or VAE", "levels", (1, 2, 5, 10, 20), colours.cast),
    DamageKind("less contrast", "too little guidance", "%", (2, 5, 10, 20, 40), colours.less_contrast),
    DamageKind("darker", "a wrong noise schedule", "levels", (1, 2, 5, 10, 20), colours.darker),
    DamageKind("coarse chroma", "a small decoder, JPEG", "times", (2, 4, 8, 16, 32), colours.coarse_chroma),
    DamageKind(SHIFT, "another resampling", "px", (0.25, 0.5, 1, 2, 4), places.shifted),
    DamageKind("ghost", "a step cache", "%", (2, 5, 10, 20, 40), places.ghosted),
    DamageKind("stale tokens", "skipped tokens", "% of area", (1, 3, 10, 20, 40), places.stale),
    DamageKind(
        "coarse other content", "a cache or mask that leaks", "% of area", (0.5, 2, 5, 10, 25), places.pasted
    ),
    DamageKind("black patches", "overflow", "% of area", (0.1, 0.5, 2, 5, 15), places.blackened),
)

HARMLESS = (
    HarmlessChange("rounding", lambda image, random: details.noisy(image, 0.5, random)),
    HarmlessChange("other arithmetic", details.drifted),
    HarmlessChange("JPEG of quality 95", lambda image, _: details.jpeg(image, 95)),
)
