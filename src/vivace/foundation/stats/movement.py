"""Speed of the machine at a time, from measurements of one recipe before and after."""

from __future__ import annotations

from bisect import bisect

Levels = list[tuple[float, float]]
"""Levels of one round, in order of time: when its first recipe was measured, and the logarithm of its median seconds
over that of the first time."""


def level_at(points: Levels, time: float) -> float:
    """Return the level at a time: interpolated between two measurements, else that of the nearest."""
    k = bisect([at for at, _ in points], time)
    if k == 0 or k == len(points):
        return points[max(0, k - 1)][1]
    (start, before), (end, after) = points[k - 1], points[k]
    share = 0.5 if end == start else (time - start) / (end - start)
    return before + share * (after - before)
