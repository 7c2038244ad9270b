"""Patches of one exact colour in images that are A's elsewhere: what a decoder leaves where values are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.measure.image_metrics import Pixels, match
from vivace.proofs.image_findings import ImageFinding, RequestOf
from vivace.proofs.pair_figures import PairFigures
from vivace.proofs.same import Nearness, OwnDistances, nearness
from vivace.report.value_text import count

_CELL = 4  # pixels
_OFF = 30.0  # levels by which a patch differs from A
_LEAST, _MOST = 0.004, 0.5
"""Share of the image that a patch covers."""


def holes(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return whether images of B have a patch of one colour where A's have none."""
    hit = []
    for pair in pairs:
        is_comparable = bool(pair.against) and not (pair.a.faults or pair.b.faults)
        if is_comparable and nearness(pair.against, own) is not Nearness.ITSELF:
            colour = _hole(pair.a.pixels, pair.b.pixels)
            hit += [(pair, colour)] if colour is not None else []
    if not hit:
        return []
    pair, (red, green, blue) = hit[0]
    summary = f"hole: {count(len(hit), 'image')} of B with a patch of one colour, which is not A's"
    return [ImageFinding(summary, f"{pair.label}: RGB {red}, {green}, {blue}", request_of(pair))]


def _hole(a: Pixels, b: Pixels) -> tuple[int, int, int] | None:
    """Return the colour of the patch; None if there is none, or the images differ elsewhere too."""
    is_flat = (_cells(b).max(axis=(1, 3)) == _cells(b).min(axis=(1, 3))).all(axis=-1)
    off = np.abs(_cells(a) - _cells(b)).mean(axis=(1, 3, 4)) > _OFF
    patch = is_flat & off
    if not _LEAST <= patch.mean() <= _MOST:
        return None
    colours = _cells(b)[:, 0, :, 0][patch]
    if (colours != colours[0]).any():
        return None
    outside = ~_with_neighbours(patch).repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    height, width = outside.shape
    filled = np.where(outside[..., None], b[:height, :width], a[:height, :width])
    if match(filled, a[:height, :width]) < (DEFAULT_LIMITS.match or 0.9):
        return None
    red, green, blue = (int(value) for value in colours[0])
    return red, green, blue


def _cells(image: Pixels) -> Pixels:
    """Return an image as cells (rows, _CELL, columns, _CELL, 3)."""
    rows, columns = (side // _CELL for side in image.shape[:2])
    return image[: rows * _CELL, : columns * _CELL].reshape(rows, _CELL, columns, _CELL, 3)


def _with_neighbours(cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return cells with those around them, over which the edge of a patch goes."""
    padded = np.pad(cells, 1)
    rows, columns = cells.shape
    around = [padded[y : y + rows, x : x + columns] for y in range(3) for x in range(3)]
    return np.asarray(np.logical_or.reduce(around))
