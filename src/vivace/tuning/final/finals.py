"""The finals of a search: comparisons of finalists with the baseline, and the images added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vivace.benchmark.run import Compared
from vivace.benchmark.store import Store
from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.workload import Workload
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row, rows_of
from vivace.tuning.final.image_plan import ImagePlan, pool_images
from vivace.tuning.search.results import recipe_of


@dataclass
class Finals:
    """All finals of a search, the last one last.

    Attributes:
        further: workloads of the batches of images after the first; none if quality is not judged.
        looks: how many batches of images the store has of each recipe.
    """

    plan: ImagePlan
    further: tuple[Workload, ...]
    store: Path
    limits: Limits
    looks: dict[Recipe, int]
    compared: list[Compared] = field(default_factory=list)
    _rows: list[list[Row]] = field(default_factory=list, repr=False)

    def add(self, compared: Compared) -> list[Row]:
        """Add a final and return its rows, judged by all stored images of its recipes."""
        self.compared.append(compared)
        self.read()
        return self._rows[-1]

    def read(self) -> None:
        """Read the images again that were added since."""
        with Store.read_only(self.store) as store:
            self._rows = [
                self.rows_with_images(
                    compared.records, replace(compared.quality, figures=store.figures()), store
                )
                for compared in self.compared
            ]

    def rows_with_images(self, records: Sequence[Record], quality: QualityPass, store: Store) -> list[Row]:
        """Return the rows of a final with the images of all batches, judged with the confidence of each look."""
        if not self.further:
            return rows_of(records, quality, self.limits)
        whole = []
        for record in records:
            with_images, looks = pool_images(record, self.further, store)
            if (recipe := recipe_of(record)) is not None:
                self.looks[recipe] = looks
            whole.append(with_images)
        return self.plan.with_verdicts(rows_of(whole, quality, self.limits))

    def rows(self, recipe: Recipe | None = None) -> list[Row]:
        """Return the rows of the last final in which a recipe was measured, or else of the last final."""
        for rows in reversed(self._rows):
            if recipe is None or any(row.recipe == recipe.text and row.latency is not None for row in rows):
                return rows
        return self._rows[-1] if self._rows else []
