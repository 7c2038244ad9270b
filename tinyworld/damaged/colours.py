"""Damage to colours and brightness; every pixel stays where it is."""

import numpy as np

from tinyworld.damaged.pictures import Pictures, as_bytes
from tinyworld.damaged.places import shifted


def turned(pictures: Pictures, degrees: float) -> Pictures:
    """Turn all hues, keeping the mean of red, green and blue: a rotation around the gray axis."""
    angle = np.deg2rad(degrees)
    third, side = (1 - np.cos(angle)) / 3, np.sin(angle) / np.sqrt(3)
    row = np.array([np.cos(angle) + third, third - side, third + side])
    matrix = np.stack([np.roll(row, k) for k in range(3)])
    return as_bytes(pictures @ matrix.T)


def gray(pictures: Pictures) -> Pictures:
    light = pictures @ np.array([0.299, 0.587, 0.114])
    return as_bytes(np.repeat(light[..., None], 3, axis=-1))


def toned(pictures: Pictures, contrast: float = 1.0, saturation: float = 1.0, gamma: float = 1.0) -> Pictures:
    """Change contrast around each picture's mean colour, saturation around gray, and gamma."""
    mean = pictures.mean(axis=(1, 2), keepdims=True)
    out = mean + contrast * (pictures - mean)
    light = out @ np.array([0.299, 0.587, 0.114])
    out = light[..., None] + saturation * (out - light[..., None])
    return as_bytes(255 * (out.clip(0, 255) / 255) ** gamma)


def posterised(pictures: Pictures, levels: int) -> Pictures:
    return as_bytes(np.round(pictures / 255 * (levels - 1)) / (levels - 1) * 255)


def fringed(pictures: Pictures, pixels: int) -> Pictures:
    """Shift red to the right and blue to the left."""
    out = pictures.copy()
    out[..., 0] = shifted(pictures, pixels)[..., 0]
    out[..., 2] = shifted(pictures, -pixels)[..., 2]
    return out


def vignetted(pictures: Pictures, share: float) -> Pictures:
    """Darken towards the corners, by `share` there."""
    y, x = (np.linspace(-1, 1, side) for side in pictures.shape[1:3])
    fall = 1 - share * (y[:, None] ** 2 + x[None] ** 2) / 2
    return as_bytes(pictures * fall[..., None])
