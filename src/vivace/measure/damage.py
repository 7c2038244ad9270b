"""Damage such as acceleration causes, at graded strengths from the edge of what is visible to what is plain to see.
Images are (H, W, 3) of 0 to 255. A harmless change is one that no viewer would mind."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vivace.measure.image_metrics import Pixels, luminance, resized

_TILE = 8  # pixels
_CELL = 8  # pixels over which other arithmetic drifts together
_HALO = 2.0  # pixels
_TOKEN = 16  # pixels a side
_STALE_BLUR = 4.0  # pixels
_GHOST = 8  # pixels
_COARSE = 4.0
_RED = np.array([1.0, 0.0, -1.0])  # and less blue
Change = Callable[[Pixels, float, np.random.Generator], Pixels]


@dataclass(frozen=True)
class DamageKind:
    """A kind of damage.

    Attributes:
        like: the cause of such damage in accelerated drawing.
    """

    name: str
    like: str
    unit: str
    strengths: tuple[float, ...]
    change: Change

    def apply(self, image: Pixels, strength: float, seed: int = 0) -> Pixels:
        """Return the damaged image. The same seed damages the same"""
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


def blurred(image: Pixels, sigma: float, _: object = None) -> Pixels:
    """Blur by a Gaussian of so many pixels, edges reflected."""
    height, width = image.shape[:2]
    margin = min(height - 1, width - 1, int(np.ceil(4 * sigma)))
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")
    down, right = np.fft.fftfreq(padded.shape[0]), np.fft.rfftfreq(padded.shape[1])
    gain = np.exp(-2 * (np.pi * sigma) ** 2 * (down[:, None] ** 2 + right[None] ** 2))
    spectrum = np.fft.rfft2(padded, axes=(0, 1)) * gain[..., None]
    filtered = np.fft.irfft2(spectrum, s=padded.shape[:2], axes=(0, 1))
    return np.asarray(filtered[margin : margin + height, margin : margin + width])


def reduced(image: Pixels, factor: float, _: object = None) -> Pixels:
    """Reduce the image by a factor and enlarge it again."""
    height, width = image.shape[:2]
    return resized(resized(image, round(height / factor), round(width / factor)), height, width)


def frequencies_rounded(image: Pixels, step: float, _: object = None) -> Pixels:
    """Round the cosine transform of tiles of 8 x 8 pixels to multiples of a step; their means are kept."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % _TILE), (0, -width % _TILE), (0, 0)), mode="edge")
    rows, columns = padded.shape[0] // _TILE, padded.shape[1] // _TILE
    # (rows, columns, 3, 8, 8)
    tiles = padded.reshape(rows, _TILE, columns, _TILE, 3).transpose(0, 2, 4, 1, 3)
    cosines = _cosines()
    spectrum = cosines @ tiles @ cosines.T
    kept = np.rint(spectrum / step) * step
    kept[..., 0, 0] = spectrum[..., 0, 0]
    tiles = cosines.T @ kept @ cosines
    return np.asarray(tiles.transpose(0, 3, 1, 4, 2).reshape(padded.shape)[:height, :width])


def _cosines() -> Pixels:
    """Return the orthonormal matrix of the cosine transform (DCT-II) of 8 values."""
    k, x = np.arange(_TILE)[:, None], np.arange(_TILE)[None]
    matrix = np.sqrt(2 / _TILE) * np.cos(np.pi * (2 * x + 1) * k / (2 * _TILE))
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix)


def drifted(image: Pixels, random: np.random.Generator) -> Pixels:
    """Add smooth noise of one grey level, as a kernel that sums in another order does over a few steps."""
    height, width = image.shape[:2]
    coarse = random.standard_normal((-(-height // _CELL), -(-width // _CELL), 3))
    return image + resized(coarse, height, width)


def sharpened(image: Pixels, amount: float, _: object = None) -> Pixels:
    """Add a multiple of the difference to the blurred image, which leaves halos along edges."""
    return image + amount * (image - blurred(image, _HALO))


def jpeg(image: Pixels, quality: int) -> Pixels:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.astype(np.uint8)).save(file, "JPEG", quality=quality, subsampling=0)
    return np.asarray(Image.open(file), dtype=np.float64)


def saturate(image: Pixels, percent: float) -> Pixels:
    """Return an image of more saturation, or with a negative number of less."""
    grey = luminance(image)[..., None]
    return np.asarray(grey + (1 + percent / 100) * (image - grey))


def less_contrast(image: Pixels, percent: float, _: object = None) -> Pixels:
    """Move all colours towards the image's mean colour."""
    mean = image.mean(axis=(0, 1))
    return np.asarray(mean + (1 - percent / 100) * (image - mean))


def coarse_chroma(image: Pixels, factor: float, _: object = None) -> Pixels:
    """Reduce the resolution of the colours by a factor; the luminance is kept."""
    height, width = image.shape[:2]
    grey = luminance(image)[..., None]
    chroma = resized(image - grey, round(height / factor), round(width / factor))
    coloured = grey + resized(chroma, height, width)
    return np.asarray(coloured + grey - luminance(coloured)[..., None])


def shifted(image: Pixels, by: float, _: object = None) -> Pixels:
    """Move the image right by a number of pixels, which may be fractional; edges are repeated."""
    number, part = int(by), by - int(by)
    moved = _moved(image, number)
    return moved if part == 0 else (1 - part) * moved + part * _moved(image, number + 1)


def _moved(image: Pixels, by: int) -> Pixels:
    width = image.shape[1]
    return np.pad(image, ((0, 0), (by, 0), (0, 0)), mode="edge")[:, :width]


def ghosted(image: Pixels, percent: float, _: object = None) -> Pixels:
    """Blend with the image moved by 8 pixels."""
    share = percent / 100
    return np.asarray((1 - share) * image + share * _moved(image, _GHOST))


def stale(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Replace tiles of 16 x 16 pixels by those of a much blurrier image."""
    height, width = image.shape[:2]
    rows, columns = -(-height // _TOKEN), -(-width // _TOKEN)
    number = max(1, round(rows * columns * percent / 100))
    chosen = np.zeros(rows * columns, dtype=bool)
    chosen[random.choice(rows * columns, number, replace=False)] = True
    mask = np.kron(chosen.reshape(rows, columns), np.ones((_TOKEN, _TOKEN), dtype=bool))[:height, :width]
    return np.where(mask[..., None], blurred(image, _STALE_BLUR), image)


def with_square(image: Pixels, other: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Paste a random square of another image that covers this share."""
    height, width = image.shape[:2]
    side = min(height, width, max(1, round(float(np.sqrt(height * width * percent / 100)))))
    top, left = int(random.integers(height - side + 1)), int(random.integers(width - side + 1))
    changed = image.copy()
    changed[top : top + side, left : left + side] = other[top : top + side, left : left + side]
    return changed


def coarse_other_content(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Paste a square of the image turned upside down, at a quarter of its resolution."""
    return with_square(image, reduced(image[::-1, ::-1], _COARSE), percent, random)


def blackened(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    return with_square(image, np.zeros_like(image), percent, random)


def noisy(image: Pixels, sigma: float, random: np.random.Generator) -> Pixels:
    """Add white noise of a standard deviation, in grey levels."""
    return image + sigma * random.standard_normal(image.shape)


def band(image: Pixels, step: float, _: object) -> Pixels:
    """Round each channel to multiples of a step, in grey levels."""
    return np.asarray(np.rint(image / step) * step)


SHIFT = "shift"
DAMAGE = (
    DamageKind("blur", "a small or wrong decoder", "px", (0.4, 0.6, 0.9, 1.5, 2.5), blurred),
    DamageKind("lost resolution", "fewer tokens, smaller latents", "times", (1.25, 1.5, 2, 3, 4), reduced),
    DamageKind("coarse frequencies", "quantised weights", "levels", (4, 8, 16, 32, 64), frequencies_rounded),
    DamageKind("noise", "too few steps", "levels", (1, 2, 4, 8, 16), noisy),
    DamageKind("halos", "too much guidance", "times", (0.1, 0.25, 0.5, 1, 2), sharpened),
    DamageKind("banding", "a coarse dtype", "levels", (2, 4, 8, 16, 32), band),
    DamageKind(
        "more saturation", "too much guidance", "%", (5, 10, 20, 40, 80), lambda i, by, _: saturate(i, by)
    ),
    DamageKind(
        "less saturation", "too little guidance", "%", (5, 10, 20, 40, 80), lambda i, by, _: saturate(i, -by)
    ),
    DamageKind(
        "colour cast", "a wrong scale or VAE", "levels", (1, 2, 5, 10, 20), lambda i, by, _: i + by * _RED
    ),
    DamageKind("less contrast", "too little guidance", "%", (2, 5, 10, 20, 40), less_contrast),
    DamageKind("darker", "a wrong noise schedule", "levels", (1, 2, 5, 10, 20), lambda i, by, _: i - by),
    DamageKind("coarse chroma", "a small decoder, JPEG", "times", (2, 4, 8, 16, 32), coarse_chroma),
    DamageKind(SHIFT, "another resampling", "px", (0.25, 0.5, 1, 2, 4), shifted),
    DamageKind("ghost", "a step cache", "%", (2, 5, 10, 20, 40), ghosted),
    DamageKind("stale tokens", "skipped tokens", "% of area", (1, 3, 10, 20, 40), stale),
    DamageKind(
        "coarse other content",
        "a cache or mask that leaks",
        "% of area",
        (0.5, 2, 5, 10, 25),
        coarse_other_content,
    ),
    DamageKind(
        "black patches",
        "overflow",
        "% of area",
        (0.1, 0.5, 2, 5, 15),
        blackened,
    ),
)

HARMLESS = (
    HarmlessChange("rounding", lambda image, random: noisy(image, 0.5, random)),
    HarmlessChange("other arithmetic", drifted),
    HarmlessChange("JPEG of quality 95", lambda image, _: jpeg(image, 95)),
)
