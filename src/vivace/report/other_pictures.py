"""Which images of a set that should show the reference's pictures show others: wrong seeds, old buffers, mixed batches.

A mean does not see them: 17 of 39 images of another seed cost 8 % of the mean `match` with each image capped, and one
image nothing. So each pair is asked for itself:

    - its `match` is below a limit: it is as far away as another seed's image;
    - it is far away where the others differ by rounding;
    - it is the reference's image of another prompt or seed of the set, which may look much like its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ANOTHER_BELOW = 0.5
"""Match below which an image shows another picture than its reference."""
_NEAR = 0.9  # match from which an image shows the same picture, unless it surely is another one's
_BESIDE_OTHERS = 50.0
"""By how much an image is further from its reference, as 1 - match, than the set's median. Of recipes that round
otherwise, bf16 among them, no image is further than 10 times."""
_LEAST_IMAGES = 6  # that have a median
_OFF, _NEARER = 1.5, 3.0
"""Distance of a thumbnail from its reference's, in levels, from which it may be another one's; and by how much it is
nearer to that."""


def other_pictures(
    matches: Sequence[float],
    thumbnails: Sequence[NDArray[np.float64]] = (),
    references: Sequence[NDArray[np.float64]] = (),
    another_below: float = ANOTHER_BELOW,
) -> list[int]:
    """Return the indices of the images that show another picture than their references.

    Args:
        matches: of each image with its reference; see `measure.image_metrics.match`.
        thumbnails, references: of the images and of their references; empty if they are not known.
    """
    lost = 1 - np.asarray(matches, dtype=np.float64)
    is_other = lost > 1 - another_below
    if len(lost) >= _LEAST_IMAGES:
        is_other |= (lost > 1 - _NEAR) & (lost > _BESIDE_OTHERS * np.median(lost))
    if len(thumbnails) > 1:
        of_images, of_references = (
            np.stack([*each]).reshape(len(lost), -1) for each in (thumbnails, references)
        )
        for k, image in enumerate(of_images):
            distances = np.linalg.norm(of_references - image, axis=1) / math.sqrt(len(image))
            own, nearest = distances[k], np.delete(distances, k).min()
            is_other[k] |= own > max(_OFF, _NEARER * nearest)
    return [int(k) for k in np.flatnonzero(is_other)]
