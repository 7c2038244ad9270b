"""The images of a final: added one batch after the other until each verdict is decided.

The batches and the confidence of each look at the images (`stats.repeated_looks`) are fixed beforehand, so that all
looks together pass a recipe below its limit no more often than a single look would. The bounds of a row are widened
accordingly, and the answer's "with 95 % confidence" holds over all looks.

A final's images have another seed than those that the search judged before: a recipe that was chosen for its images
must prove itself on new ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vivace.benchmark.run import Compared
from vivace.benchmark.store import Store
from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.workload import Workload
from vivace.foundation.stats import MIN_GROUPS, Gate, Interval
from vivace.foundation.stats.intervals import student_t
from vivace.foundation.stats.sequential import sure_of_each
from vivace.models.find import LocatedModel
from vivace.models.prompts import FURTHER_PROMPTS
from vivace.recipes.recipe import Recipe
from vivace.report.fidelity import Fidelity
from vivace.report.quality_gate import Judgement, judge_figures
from vivace.report.rows import Row, rows_of
from vivace.report.variety import SURE_FAIL, SURE_PASS
from vivace.tuning.search.results import recipe_of
from vivace.tuning.settings import ImageRequest

FINAL_SEED = 1
_SURE_OF_INTERVALS = 0.975  # one-sided, of the intervals of SSIM and PSNR
_BOUNDED = ("clip", "witness", "match", "outside", "source")
_RELAXED = frozenset({"match", "ssim", "psnr_db"})
_DECIDED_BY_FIGURES = frozenset({*_BOUNDED, "ssim", "psnr_db"})


@dataclass(frozen=True)
class ImagePlan:
    """The images of a final: its batches, of which the rounds draw the first; and the images of a recipe and the
    different prompts after each."""

    batches: tuple[WorkloadRequest, ...]
    sizes: tuple[int, ...]
    num_prompts: tuple[int, ...]

    @classmethod
    def of(
        cls, located: LocatedModel, request: ImageRequest, prompts: Sequence[str], seeds: int = 1
    ) -> ImagePlan:
        """Return the plan: new prompts, where there is a set of them, then new seeds; `seeds` a prompt at first."""
        is_text = request.task in (None, "text") and not request.images and not request.controls
        first = len(prompts) if seeds == 1 or not is_text else max(MIN_GROUPS, math.ceil(len(prompts) / 2))
        halves = [half for half in (prompts[:first], prompts[first:]) if half]
        parts = [request.of(half, seeds=seeds, seed=FINAL_SEED) for half in halves]
        further = FURTHER_PROMPTS.get(located.prompt_set, ()) if is_text and request.prompts is None else ()
        parts += [request.of(batch, seed=FINAL_SEED) for batch in further]
        seed = FINAL_SEED + seeds
        if further:
            every = (*prompts, *(prompt for batch in further for prompt in batch))
            parts.append(request.of(every, seed=seed))
        else:
            parts += [
                request.of(prompts, seed=seed),
                request.of(prompts, seed=seed + 1),
                request.of(prompts, seeds=3, seed=seed + 2),
            ]
        images = [len(part.prompts or ()) * (part.num_seeds or 1) for part in parts]
        sizes = tuple(itertools.accumulate(images))
        by_look = [
            {prompt for part in parts[: look + 1] for prompt in part.prompts or ()}
            for look in range(len(parts))
        ]
        return cls(tuple(parts), sizes, tuple(map(len, by_look)))

    @property
    def sure(self) -> float:
        """The confidence with which a recipe must pass at each look."""
        return sure_of_each(SURE_PASS, self.sizes)

    def prompts_at(self, look: int) -> float:
        """Return the effective number of prompts of a look: further seeds of a prompt count as their square root."""
        return math.sqrt(self.num_prompts[look] * self.sizes[look])

    def num_images(self, look: int) -> int:
        """Return the images of the batch that precedes a look; the first look is 0."""
        return self.sizes[look] - (self.sizes[look - 1] if look else 0)

    def with_verdicts(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a final with bounds and verdicts of the confidence of each look."""
        floor = next((row.noise_floor for row in rows if row.noise_floor is not None), None)
        return [self._judged(row, floor) for row in rows]

    def _judged(self, row: Row, floor: Fidelity | None) -> Row:
        fidelity, judgement = row.fidelity, row.judgement
        if row.is_baseline or fidelity is None or judgement is None:
            return row
        fidelity = self._widened(fidelity)
        if judgement.gate is Gate.FAILED and judgement.figure not in _DECIDED_BY_FIGURES:
            return replace(
                row, fidelity=fidelity
            )  # broken images do not depend on how often they are looked at
        trial = row.record.trial
        stricter: Judgement = judge_figures(
            fidelity,
            floor,
            row.limits,
            same_picture=trial.recipe.same_picture,
            edits=trial.workload.task == "edit",
        )
        return replace(row, fidelity=fidelity, judgement=stricter)

    def _widened(self, fidelity: Fidelity) -> Fidelity:
        changed: dict[str, Any] = {}
        dof = fidelity.num_prompts - 1
        for name in _BOUNDED:
            kept = getattr(fidelity, name)
            if kept is not None:
                bounds = self._wider(kept.bounds, SURE_PASS, SURE_FAIL, dof)
                changed[name] = replace(kept, bounds=bounds)
        for name in ("ssim", "psnr_db"):
            interval = getattr(fidelity, name)
            if interval is not None:
                changed[name] = self._wider(interval, _SURE_OF_INTERVALS, _SURE_OF_INTERVALS, dof)
        return replace(fidelity, **changed)

    def _wider(self, interval: Interval, passes: float, fails: float, dof: int) -> Interval:
        if interval.low is None or interval.high is None:
            return interval
        below, above = (
            student_t(sure_of_each(sure, self.sizes), dof) / student_t(sure, dof) for sure in (passes, fails)
        )
        point = interval.point
        return Interval(
            point, point - below * (point - interval.low), point + above * (interval.high - point)
        )


def needs_floor(rows: Sequence[Row]) -> bool:
    """Return whether the noise floor may change a verdict: it bounds the requirement on recipes that keep the image."""
    if not rows or rows[0].floor is not None:
        return False
    judgements = [row.judgement for row in rows[1:] if row.judgement is not None]
    return any(judgement.gate is not Gate.PASSED and judgement.figure in _RELAXED for judgement in judgements)


def pool_images(record: Record, workloads: Sequence[Workload], store: Store) -> tuple[Record, int]:
    """Return a record of a final with the images of all stored batches, and the number of these."""
    first, *others = record.rounds
    images = list(first.pictures)
    number = 1
    for workload in workloads:
        trial = record.trial.model_copy(update={"workload": workload})
        stored = store.record(trial.key(record.environment))
        rounds = () if stored is None else stored.rounds
        more = next((round_.pictures for round_ in reversed(rounds) if round_.pictures), ())
        if not more:
            break
        images += more
        number += 1
    first = first.model_copy(update={"pictures": tuple(images)})
    return record.model_copy(update={"rounds": (first, *others)}), number


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
