"""Times and memory of full-size models that vivace's own records hold, for estimates before a run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import resources

KNOWN = "known.csv"
COLUMNS = (
    "model", "recipe", "height", "width", "steps", "device", "rest_s", "step_s", "first_call_s", "model_bytes",
    "peak_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class RecordedFigures:
    """What a committed record says of a recipe on a model with random weights.

    Attributes:
        rest_s: seconds of a call outside of the denoising steps; of the whole call where the recipe sets the number of
            steps, which takes as long whatever the workload's is.
        step_s: seconds of a step; 0 where the recipe sets their number.
    """

    steps: int
    device: str
    rest_s: float
    step_s: float
    first_call_s: float
    model_bytes: int
    peak_bytes: int

    def seconds(self, steps: int) -> float:
        """Return the estimated seconds of a call with another number of steps."""
        return self.rest_s + steps * self.step_s


def recorded_figures(model: str, recipe: str, height: int, width: int, steps: int) -> RecordedFigures | None:
    """Return the record whose number of steps is nearest; None if there is none of this recipe and size.

    Of several devices, that of which the most is known of this model and size: what is estimated of its recipes is then
    of one device, as far as possible.
    """
    figures = all_recorded().get((model, recipe, height, width), ())
    numbers = _recipes_by_device(model, height, width)
    return min(
        figures, key=lambda figures: (-numbers[figures.device], abs(figures.steps - steps)), default=None
    )


@cache
def _recipes_by_device(model: str, height: int, width: int) -> Counter[str]:
    """Return of how many recipes each device has a record."""
    return Counter(
        device
        for (name, _, *size), figures in all_recorded().items()
        if (name, size) == (model, [height, width])
        for device in {figures.device for figures in figures}
    )


@cache
def all_recorded() -> dict[tuple[str, str, int, int], tuple[RecordedFigures, ...]]:
    """Return all records, by model, recipe, height and width."""
    text = resources.files("vivace.studies").joinpath("published", KNOWN).read_text("utf-8")
    figures: dict[tuple[str, str, int, int], tuple[RecordedFigures, ...]] = {}
    for line in csv.DictReader(io.StringIO(text)):
        key = (line["model"], line["recipe"], int(line["height"]), int(line["width"]))
        row_figures = RecordedFigures(
            steps=int(line["steps"]),
            device=line["device"],
            rest_s=float(line["rest_s"]),
            step_s=float(line["step_s"]),
            first_call_s=float(line["first_call_s"]),
            model_bytes=int(line["model_bytes"]),
            peak_bytes=int(line["peak_bytes"]),
        )
        figures[key] = (*figures.get(key, ()), row_figures)
    return figures
