"""Protocols of a search: the measurer, and the observer of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vivace.recipes.recipe import Recipe
from vivace.tuning.search.results import Result


class Measurer(Protocol):
    """Measures recipes. Failures are outcomes, never exceptions."""

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Return the recipes that cannot work here, without measuring."""
        ...

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Return each recipe's result of a few calls, without quality."""
        ...

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Return each recipe's result at full steps, with quality by few prompts."""
        ...

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Return the results of recipes measured interleaved with the baseline, with quality by the first images."""
        ...

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Draw the next batch of images of proven recipes; return the recipes with new images, judged by all.

        None are returned if there are no more batches, or no time.
        """
        ...


class Watcher(Protocol):
    """Observer of a search, for a terminal."""

    def note(self, text: str) -> None: ...
    def measured(self, result: Result, history: Sequence[Result]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...


class Unwatched:
    """An observer that does nothing."""

    def note(self, text: str) -> None: ...
    def measured(self, result: Result, history: Sequence[Result]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...
