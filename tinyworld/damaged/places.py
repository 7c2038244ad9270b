"""Damage to where things are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from tinyworld.damaged.pictures import Pictures, as_bytes


def shifted(pictures: Pictures, x: int, y: int = 0) -> Pictures:
    """Shift to the right and down; what comes in is a copy of the edge."""
    reach = max(abs(x), abs(y))
    padded = np.pad(pictures, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    height, width = pictures.shape[1:3]
    return padded[:, reach - y : reach - y + height, reach - x : reach - x + width]


def rotated(pictures: Pictures, degrees: float) -> Pictures:
    """Rotate around the centre; what comes in is a copy of the edge."""
    turned_ = ndimage.rotate(
        pictures.astype(np.float32), degrees, axes=(1, 2), reshape=False, order=1, mode="nearest"
    )
    return as_bytes(turned_)


def enlarged(pictures: Pictures, factor: float) -> Pictures:
    """Enlarge the middle to the whole picture."""
    side = pictures.shape[1]
    inner = round(side / factor)
    start = (side - inner) // 2
    box = (start, start, start + inner, start + inner)
    resized = [
        Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC, box=box)
        for picture in pictures
    ]
    return np.stack([np.asarray(picture) for picture in resized])


def warped(pictures: Pictures, matrix: Sequence[Sequence[float]]) -> Pictures:
    """Map coordinates (row, column) around the centre by a 2 x 2 matrix; what comes in is a copy of the edge."""
    centre = np.array(pictures.shape[1:3]) / 2 - 0.5
    offset = centre - np.array(matrix) @ centre

    def warped_channel(channel: NDArray[np.float32]) -> NDArray[np.float32]:
        return ndimage.affine_transform(channel, np.array(matrix), offset, order=1, mode="nearest")

    moved = [
        np.stack([warped_channel(picture[..., c].astype(np.float32)) for c in range(3)], axis=-1)
        for picture in pictures
    ]
    return as_bytes(np.stack(moved))


def waved(pictures: Pictures, reach: float) -> Pictures:
    """Shift each row by up to `reach` pixels, in a wave of 32 rows."""
    rows = np.arange(pictures.shape[1])
    shifts = np.round(reach * np.sin(2 * np.pi * rows / 32)).astype(int)
    columns = (np.arange(pictures.shape[2])[None] - shifts[:, None]).clip(0, pictures.shape[2] - 1)
    return pictures[:, rows[:, None], columns]


def tiles_exchanged(pictures: Pictures) -> Pictures:
    """Exchange the quarters crosswise."""
    return np.roll(pictures, [side // 2 for side in pictures.shape[1:3]], axis=(1, 2))
