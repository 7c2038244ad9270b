"""Damage to fine details: blur, noise, compression, resolution."""

import io

import numpy as np
from PIL import Image
from scipy import ndimage

from tinyworld.damaged.pictures import Pictures, as_bytes


def blurred(pictures: Pictures, sigma: float) -> Pictures:
    return as_bytes(ndimage.gaussian_filter(pictures.astype(np.float32), (0, sigma, sigma, 0)))


def encoded(pictures: Pictures, format_: str, quality: int) -> Pictures:
    """Save in a lossy format and read again, as PIL does by default (JPEG: colour at half resolution)."""

    def again(picture: Pictures) -> Pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format=format_, quality=quality)
        return np.asarray(Image.open(file).convert("RGB"))

    return np.stack([again(picture) for picture in pictures])


def noisy(pictures: Pictures, deviation: float) -> Pictures:
    noise = np.random.default_rng(0).normal(0, deviation, pictures.shape)
    return as_bytes(pictures + noise)


def pixelated(pictures: Pictures, side: int) -> Pictures:
    """Replace squares of `side` pixels by their mean colour."""
    number, height, width, _ = pictures.shape
    squares = pictures.reshape(number, height // side, side, width // side, side, 3).mean(axis=(2, 4))
    return as_bytes(squares.repeat(side, axis=1).repeat(side, axis=2))


def speckled(pictures: Pictures, share: float) -> Pictures:
    """Make a share of all pixels black or white."""
    random = np.random.default_rng(0)
    out = pictures.copy()
    hit = random.random(pictures.shape[:3]) < share
    out[hit] = random.choice(np.array([0, 255], np.uint8), int(hit.sum()))[:, None]
    return out


def resampled(pictures: Pictures, side: int) -> Pictures:
    """Resize to `side` pixels and back."""
    full = pictures.shape[1]
    small = [Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC) for picture in pictures]
    return np.stack([np.asarray(picture.resize((full, full), Image.Resampling.BICUBIC)) for picture in small])


def sharpened(pictures: Pictures, amount: float) -> Pictures:
    """Add `amount` times the difference from the picture blurred by a pixel."""
    images = pictures.astype(np.float32)
    return as_bytes(images + amount * (images - ndimage.gaussian_filter(images, (0, 1, 1, 0))))
