"""Times and memory of full-size models from vivace's own records, for estimates before a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from vivace.evidence.committed import committed_tables
from vivace.evidence.tables import CallParts, EvidenceTable

_STUDIES = "results/study-"
_SKIPPED_WORK = "results/skipped-work-"
"""Records that are left out: the starts of searches were measured without these step caches at fixed shares of hits."""


class RecordedFigures(CallParts):
    """A committed record's figures of a recipe on a model with random weights."""

    device: str
    first_call_s: float
    peak_bytes: int

    def seconds(self, steps: int) -> float:
        """Return the estimated seconds of a call with another number of steps."""
        return self.rest_s + steps * self.step_s


def recorded_figures(model: str, recipe: str, height: int, width: int, steps: int) -> RecordedFigures | None:
    """Return the record whose number of steps is nearest; None if there is none of this recipe and size.

    Among several devices, the one with the most recipes of this model and size is used, so that estimates are of one
    device as far as possible.
    """
    figures = all_recorded().get((model, recipe, height, width), ())
    numbers = _recipes_by_device(model, height, width)
    return min(
        figures, key=lambda figures: (-numbers[figures.device], abs(figures.steps - steps)), default=None
    )


@cache
def _recipes_by_device(model: str, height: int, width: int) -> Counter[str]:
    return Counter(
        device
        for (name, _, *size), figures in all_recorded().items()
        if (name, size) == (model, [height, width])
        for device in {figures.device for figures in figures}
    )


@cache
def all_recorded() -> dict[tuple[str, str, int, int], tuple[RecordedFigures, ...]]:
    """Return all records, by model, recipe, height and width: for each number of steps and device the last one."""
    latest = {(*key, figures.steps, figures.device): figures for key, figures in _figures()}
    by_recipe: dict[tuple[str, str, int, int], tuple[RecordedFigures, ...]] = {}
    for (model, recipe, height, width, *_), figures in latest.items():
        key = (model, recipe, height, width)
        by_recipe[key] = (*by_recipe.get(key, ()), figures)
    return by_recipe


def _figures() -> Iterator[tuple[tuple[str, str, int, int], RecordedFigures]]:
    """Yield the figures of every row; a study's row counts where no other record has it."""

    def is_of_other_record(table: EvidenceTable) -> bool:
        return not table.place.startswith(_STUDIES)

    for table in sorted(committed_tables(), key=is_of_other_record):
        if table.place.startswith(_SKIPPED_WORK):
            continue
        for row in table.rows:
            if row.parts is None or row.peak_bytes is None or table.height is None or table.width is None:
                continue
            figures = RecordedFigures(
                **vars(row.parts),
                device=table.gpu,
                first_call_s=row.first_call_s or 0.0,
                peak_bytes=row.peak_bytes,
            )
            yield (table.model, row.recipe, table.height, table.width), figures
