"""The rule that chooses one of several recipes, the same for records and for searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def simplest_of_best(
    best: T,
    candidates: Sequence[T],
    is_as_good: Callable[[T, T], bool],
    order: Callable[[T], tuple[float, ...]],
) -> tuple[T, list[T]]:
    """Return the simplest of the candidates that are statistically tied with the best, and all that are tied.

    Args:
        is_as_good: whether a candidate, the first argument, is as good as the best, as far as its figures tell.
        order: the simplest is the least by this.
    """
    equals = [candidate for candidate in candidates if candidate is best or is_as_good(candidate, best)]
    return min(equals, key=order), equals
