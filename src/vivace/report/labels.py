"""Place the labels of a scatter plot close to their points, without overlaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_DOT = 5.0
_LABEL_HEIGHT = 13.0

Box = tuple[float, float, float, float]  # left, top, right, bottom


def place_labels(
    texts: Sequence[str], points: Sequence[tuple[float, float]], bars: Sequence[Box], inside: Box
) -> list[tuple[float, float]]:
    """Return the labels' centres, each as close to its point as possible without covering a dot, label or bar.

    Args:
        bars: the lines that should not be crossed, as boxes.
        inside: the box that holds all labels.
    """
    dots = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in points]
    boxes: list[Box] = []
    centres = []
    for text, point in zip(texts, points, strict=True):
        candidates = list(_around(point, 7.0 * len(text) + 3))
        # If nothing else is free a label may cross a bar, but never a dot or another label.
        for obstacles in ([*dots, *boxes, *bars], [*dots, *boxes], boxes):
            free = (b for b in candidates if _fits(b, inside) and not any(_overlap(b, o) for o in obstacles))
            box = next(free, None)
            if box is not None:
                break
        box = box or candidates[0]
        boxes.append(box)
        centres.append((round((box[0] + box[2]) / 2, 1), round((box[1] + box[3]) / 2, 1)))
    return centres


def _around(point: tuple[float, float], width: float) -> Iterator[Box]:
    """Yield boxes around a point, the nearest first; above before beside, since error bars are horizontal."""
    for distance in range(13, 133, 6):
        for degrees in (-90, 90, -45, -135, 45, 135, 0, 180, -67, -113, 67, 113, -22, -158, 22, 158):
            angle = math.radians(degrees)
            x = point[0] + math.cos(angle) * (distance + (width / 2 - 5) * abs(math.cos(angle)))
            y = point[1] + math.sin(angle) * distance
            yield x - width / 2, y - _LABEL_HEIGHT / 2, x + width / 2, y + _LABEL_HEIGHT / 2


def _fits(box: Box, inside: Box) -> bool:
    return box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
