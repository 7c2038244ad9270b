"""Damage to an image's fine detail."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.float64]
_TILE = 8  # pixels
_CELL = 8  # pixels over which other arithmetic drifts together
_HALO = 2.0  # pixels


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


def resized(image: Pixels, height: int, width: int) -> Pixels:
    from PIL import Image

    size = (max(1, width), max(1, height))
    channels = [
        np.asarray(
            Image.fromarray(image[..., k].astype(np.float32)).resize(size, Image.Resampling.BICUBIC),
            dtype=np.float64,
        )
        for k in range(image.shape[2])
    ]
    return np.stack(channels, axis=-1)


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


def noisy(image: Pixels, sigma: float, random: np.random.Generator) -> Pixels:
    """Add white noise of a standard deviation, in grey levels."""
    return image + sigma * random.standard_normal(image.shape)


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
