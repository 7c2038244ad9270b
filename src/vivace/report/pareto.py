"""The Pareto front: the recipes that no other recipe beats in both of two figures."""

from __future__ import annotations

from collections.abc import Sequence


def front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the values that no other value beats, by the first figure.

    A value is beaten by one that is at least as large in both figures and larger in one.
    """
    kept = [
        i
        for i, (x, y) in enumerate(values)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in values)
    ]
    return sorted(kept, key=lambda i: (values[i][0], -values[i][1]))
