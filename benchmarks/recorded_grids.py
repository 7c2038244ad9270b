"""Grids of recipes as `benchmarks.tuner_grids` recorded them: what a search may see, and what is held out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vivace.foundation.spec.limits import CLIP_LIMITS, ONE_VIEW
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.space import Space

RECORDED, FINAL = 10, 13 * math.sqrt(3)
"""Prompts of most records, and of a final: further seeds of a prompt count as their root."""
_PROMPTS = 13  # of a record that says how many images it has

Rounds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Entry:
    """A recipe of a grid.

    Attributes:
        rounds: seconds of the calls of each round that a search may see.
        true_s: what held-out rounds say; of the only round, if there is one.
        all_s: what all rounds say, those that a search sees included.
        gate, slack: the verdict on its images, and by how much the bound exceeds the limit.
        width: from the bound to the mean.
        prompts: of the record.
    """

    recipe: Recipe
    outcome: Outcome
    rounds: tuple[tuple[float, ...], ...] = ()
    true_s: float = math.inf
    all_s: float = math.inf
    peak_bytes: float | None = None
    first_call_s: float | None = None
    gate: Gate | None = None
    slack: float | None = None
    width: float = 0.0
    prompts: float = RECORDED

    @property
    def is_below_the_limit(self) -> bool:
        """Whether the mean of its images, not only the bound, is below the limit."""
        return self.slack is not None and self.slack + self.width < 0


@dataclass(frozen=True)
class Grid:
    """A recorded grid; the baseline is its first entry."""

    name: str
    device_name: str
    is_cpu: bool
    has_quality: bool
    entries: dict[Recipe, Entry]

    @property
    def baseline(self) -> Entry:
        return next(iter(self.entries.values()))

    @property
    def has_one_round(self) -> bool:
        return len(self.baseline.rounds) == 1

    @property
    def allowed(self) -> list[Entry]:
        """The recipes that were measured and whose quality passes."""
        return [
            entry
            for entry in self.entries.values()
            if entry.rounds and (not self.has_quality or entry.gate is Gate.PASSED or entry is self.baseline)
        ]

    @property
    def best(self) -> Entry:
        return min(self.allowed, key=lambda entry: entry.true_s)


def read_grid(path: Path) -> Grid:
    """Read a grid that `benchmarks.tuner_grids` wrote."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    timed = _rounds(contents["rows"])
    entries = {}
    for row in contents["rows"]:
        recipe = resolve(row["recipe"])
        slack = width = None
        # Ten images were scored by one view of tiny-clip, more by five.
        clip = CLIP_LIMITS["tiny-clip" if "images" in row else ONE_VIEW]
        for name, limit in (("clip", clip), ("match", 0.9)):
            if name in row and (name == "clip" or recipe.same_picture):
                low, point, _ = row[name]
                if slack is None or low - limit < slack:
                    slack, width = low - limit, point - low
        searched, held_out = timed.get(row["recipe"], ((), ()))
        entries[recipe] = Entry(
            recipe,
            Outcome(row["outcome"]),
            searched,
            median_s(held_out),
            median_s(searched if searched == held_out else (*searched, *held_out)),
            row.get("peak"),
            row.get("first_call_s"),
            Gate(row["gate"]) if "gate" in row else None,
            slack,
            width or 0.0,
            math.sqrt(row["images"] * _PROMPTS) if "images" in row else RECORDED,
        )
    return Grid(
        contents["model"],
        contents["device_name"],
        contents["device"] == "cpu",
        contents.get("judged", True),
        entries,
    )


def _rounds(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[Rounds, Rounds]]:
    """Return the rounds that a search sees, and those that are held out, by recipe.

    Rounds of the same index were measured one after the other, so what the machine did to the other recipes is taken
    out of each one's. Recipes that pass have all rounds, the fastest of them more, and others a few, which were
    measured by themselves. Recipes without such rounds have the one of the first recording, on the scale of the others.
    They never pass.
    """
    again = {row["recipe"]: np.array(row["again"]) for row in rows if "again" in row}
    if not again:
        return {row["recipe"]: (tuple(map(tuple, row["s"])),) * 2 for row in rows if "s" in row}
    long = max(map(len, again.values())) / 2
    logs = {recipe: np.log(np.median(of, axis=1)) for recipe, of in again.items() if len(of) >= long}
    off = {recipe: of - of.mean() for recipe, of in logs.items()}
    by_recipe: dict[str, tuple[Rounds, Rounds]] = {}
    shifts = []
    for row in rows:
        if row["recipe"] in again:
            samples = again[row["recipe"]]
            drift = np.zeros(len(samples))
            if row["recipe"] in off:
                others = [of for recipe, of in off.items() if recipe != row["recipe"]]
                drift = np.array(
                    [np.median([of[k] for of in others if len(of) > k]) for k in range(len(samples))]
                )
            steady = samples / np.exp(drift)[:, None]
            by_recipe[row["recipe"]] = (tuple(map(tuple, steady[::2])), tuple(map(tuple, steady[1::2])))
            shifts.append(math.log(np.median(steady) / np.median(row["s"])))
    shift = math.exp(float(np.median(shifts)))
    for row in rows:
        if "s" in row and row["recipe"] not in again:
            once = tuple(tuple(shift * s for s in samples) for samples in row["s"])
            by_recipe[row["recipe"]] = (once, once)
    return by_recipe


def median_s(rounds: Rounds) -> float:
    return float(np.median([np.median(times) for times in rounds])) if rounds else math.inf


class FixedSpace(Space):
    """A fixed list of recipes, such as a recorded grid."""

    def __init__(self, recipes: list[Recipe], objective: Objective | None = None) -> None:
        super().__init__(objective or Objective())
        self.recipes = recipes
        self._known = set(recipes)
        self._held_before: dict[Recipe, bool] = {}
        self.options = list(dict.fromkeys(t for recipe in recipes for t in recipe))

    def holds(self, recipe: Recipe) -> bool:
        if recipe not in self._held_before:
            self._held_before[recipe] = recipe in self._known and super().holds(recipe)
        return self._held_before[recipe]

    def leave_out(self, technique: Technique, reason: str) -> None:
        super().leave_out(technique, reason)
        self._held_before.clear()

    def pool(
        self, value: Callable[[list[Recipe]], Any], around: list[Recipe], width: int = 4
    ) -> list[Recipe]:
        return [recipe for recipe in self.recipes if self.holds(recipe)]
