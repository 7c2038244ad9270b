"""Holes: rectangles of one exact colour in an image, as of values that are not finite, or of lost tiles.

The faults of a whole image do not see them, and neither do its means: a black square of 24 pixels changes the figures
of an image of 128 pixels by 3 %. In an image that is its reference elsewhere, a hole is a patch that is not the
reference's (`hole_share`). In another picture it is told by its edges (`num_rectangles`): a VAE blurs its own over two
pixels or more, so no image of a set has any, unless the model draws such rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vivace.measure.image_metrics import Pixels, image_metrics, paired_metrics
from vivace.measure.lpips import Lpips

_CELL = 4  # pixels
_LEAST = 3  # cells a side: a square of 16 pixels has as many, wherever it lies
_MOST = 0.5  # of the image's area
_OFF = 30.0  # levels by which it differs from the reference on average
_STEP = 24.0  # levels by which the pixels around it differ from it
_EDGE_SHARE = 0.8  # of the pixels around it
_SAME_ELSEWHERE = 0.9  # match


class _Rectangle(NamedTuple):
    """Its sides in pixels; the last two are not part of it."""

    top: int
    left: int
    bottom: int
    right: int

    def of(self, image: Pixels) -> Pixels:
        return image[self.top : self.bottom, self.left : self.right]


def hole_share(image: Pixels, reference: Pixels) -> float:
    """Return the share of an image (H, W, 3), 0 to 255, that is holes, of which its reference has none.

    It is 0 if the images, of the same size, differ elsewhere too.
    """
    if not np.isfinite(image).all():
        return 0.0
    listed = [r for r in _rectangles(image) if np.abs(r.of(image) - r.of(reference)).mean() > _OFF]
    drawn = set(_rectangles(reference)) if listed else set()
    listed = [rectangle for rectangle in listed if rectangle not in drawn]  # those have another colour
    if not listed:
        return 0.0
    filled = image.copy()
    for rectangle in listed:
        rectangle.of(filled)[:] = rectangle.of(reference)
    contrast = float(((reference - reference.mean(axis=(0, 1))) ** 2).mean())
    if float(((filled - reference) ** 2).mean()) > (1 - _SAME_ELSEWHERE) * contrast:
        return 0.0
    return sum((r.bottom - r.top) * (r.right - r.left) for r in listed) / float(image[..., 0].size)


def figures_alone(image: Pixels) -> dict[str, float]:
    """Return the figures of an image (H, W, 3), 0 to 255, that need no reference."""
    return image_metrics(image) | {"num_rectangles": float(num_rectangles(image))}


def figures_against(image: Pixels, reference: Pixels, lpips: Lpips | None = None) -> dict[str, float]:
    """Return the figures of an image against its reference: `paired_metrics`, holes, and LPIPS if it is given."""
    figures = paired_metrics(image, reference)
    figures |= {"hole": hole_share(image, reference), "num_rectangles": num_rectangles(image, reference)}
    if lpips is not None:
        (figures["lpips"],) = lpips.distances([image], [reference])
    return figures


def num_rectangles(image: Pixels, reference: Pixels | None = None) -> int:
    """Return the number of rectangles of one exact colour with hard edges in an image (H, W, 3), 0 to 255.

    Args:
        reference: only those count that differ from it; files that lose details make nearly flat areas exactly so.
    """
    if not np.isfinite(image).all():
        return 0
    return sum(
        _has_hard_edges(image, each)
        for each in _rectangles(image)
        if reference is None or np.abs(each.of(image) - each.of(reference)).mean() > _OFF
    )


def _rectangles(image: Pixels) -> Iterator[_Rectangle]:
    """Yield the rectangles of one colour that are not part of a larger area of it."""
    rows, columns = (side // _CELL for side in image.shape[:2])
    levels = np.rint(image[: rows * _CELL, : columns * _CELL]).astype(np.uint8)
    cells = levels.reshape(rows, _CELL, columns, _CELL, 3)
    colours = cells[:, 0, :, 0]
    is_flat = (cells == colours[:, None, :, None]).all(axis=(1, 3, 4))
    as_left, as_above = np.zeros((2, rows, columns), dtype=bool)
    as_left[:, 1:] = (colours[:, 1:] == colours[:, :-1]).all(axis=-1) & is_flat[:, 1:] & is_flat[:, :-1]
    as_above[1:] = (colours[1:] == colours[:-1]).all(axis=-1) & is_flat[1:] & is_flat[:-1]
    for y, x in zip(*np.nonzero(is_flat & ~as_left & ~as_above), strict=True):
        width, height = _run(as_left[y, x + 1 :]), _run(as_above[y + 1 :, x])
        inside = np.s_[y : y + height, x : x + width]
        if min(width, height) < _LEAST or width * height > _MOST * rows * columns:
            continue
        if not (is_flat[inside].all() and (colours[inside] == colours[y, x]).all()):
            continue
        rest = [as_left[y : y + height, x], as_above[y, x : x + width]]
        rest += [as_left[y : y + height, x + width]] if x + width < columns else []
        rest += [as_above[y + height, x : x + width]] if y + height < rows else []
        if not any(side.any() for side in rest):
            yield _grown(image, *(_CELL * int(k) for k in (y, x, y + height, x + width)))


def _run(continues: NDArray[np.bool_]) -> int:
    """Return the length of a run from its first cell on."""
    ends = np.flatnonzero(~continues)
    return 1 + (int(ends[0]) if len(ends) else len(continues))


def _grown(image: Pixels, top: int, left: int, bottom: int, right: int) -> _Rectangle:
    """Return the rectangle up to the pixels at which its colour ends."""
    height, width = image.shape[:2]
    is_own = (image == image[top, left]).all(axis=-1)
    for _ in range(_CELL):
        top -= top > 0 and bool(is_own[top - 1, left:right].all())
        left -= left > 0 and bool(is_own[top:bottom, left - 1].all())
        bottom += bottom < height and bool(is_own[bottom, left:right].all())
        right += right < width and bool(is_own[top:bottom, right].all())
    return _Rectangle(top, left, bottom, right)


def _has_hard_edges(image: Pixels, rectangle: _Rectangle) -> bool:
    """Return whether the colour ends from one pixel to the next, on two sides within the image or more."""
    top, left, bottom, right = rectangle
    colour = image[top, left]
    height, width = image.shape[:2]
    around = [image[top - 1, left:right]] if top > 0 else []
    around += [image[bottom, left:right]] if bottom < height else []
    around += [image[top:bottom, left - 1]] if left > 0 else []
    around += [image[top:bottom, right]] if right < width else []
    steps = np.concatenate([np.abs(line - colour).max(axis=-1) for line in around] or [np.zeros(1)])
    return len(around) > 1 and float((steps > _STEP).mean()) >= _EDGE_SHARE
