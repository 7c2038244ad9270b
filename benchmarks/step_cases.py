"""The cases of `benchmarks.step_curves`: a recipe with its figures and its work, and files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record_files import read_list, write_list
from vivace.errors import StoreError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.figures import ImageFigures, QualityPass
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Record
from vivace.report.rows import Row, rows_of


class Case(Spec):
    """One recipe.

    figures: figures of the record's images against the baseline's.
    scorer: the CLIP model of their scores.
    work: the denoiser's operations over the baseline's; None if nothing was measured.
    """

    record: Record
    figures: tuple[ImageFigures, ...]
    scorer: str | None
    work: float | None

    @property
    def recipe(self) -> str:
        return self.record.trial.recipe.text


def read_cases(path: Path) -> dict[str, Case]:
    """Read the cases by recipe, in the record's order; empty if there is no such file.

    Raises:
        StoreError: the file is not a list of cases.
    """
    return {case.recipe: case for case in read_list(path, Case)}


def write_cases(path: Path, cases: Any) -> None:
    """Write a JSON list atomically, one case per line."""
    write_list(path, (json.dumps(_rounded(case.model_dump(mode="json"))) for case in cases))


def with_rounds(baseline: Case, again: Record) -> Case:
    """Return the baseline's case with the rounds that were measured beside another recipe."""
    rounds = {r.index: r for r in again.rounds} | {r.index: r for r in baseline.record.rounds}
    merged = tuple(rounds[index] for index in sorted(rounds))
    return baseline.model_copy(update={"record": baseline.record.model_copy(update={"rounds": merged})})


def rows_with_quality(cases: Mapping[str, Case]) -> dict[str, Row]:
    """Return the row of each recipe, compared with the baseline; empty without a baseline."""
    if BASELINE not in cases:
        return {}
    ordered = [cases[BASELINE], *(case for recipe, case in cases.items() if recipe != BASELINE)]
    figures = {row.key: row for case in ordered for row in case.figures}
    rows = rows_of([case.record for case in ordered], QualityPass(figures, ordered[0].scorer))
    return {row.recipe: row for row in rows}


def check_pictures(cases: Mapping[str, Case], prompts: Sequence[str], num_seeds: int, path: Path) -> None:
    """Check that the record has the same prompts and seeds; rows of different images cannot be compared.

    Raises:
        StoreError: the record has others.
    """
    for case in list(cases.values())[:1]:
        held = case.record.trial.workload
        if (held.prompts, len(held.seeds)) != (tuple(prompts), num_seeds):
            raise StoreError(
                f"{path} has {len(held.prompts)} prompts at {len(held.seeds)} seeds, but {len(prompts)} at "
                f"{num_seeds} are asked for; give the same --prompts and --seeds, or --record another file"
            )


def check_baseline(cases: Mapping[str, Case], baseline: Record, path: Path) -> None:
    """Check that the baseline's images, which a resumed run may have generated again, are those of the record.

    Raises:
        StoreError: they differ.
    """
    if BASELINE not in cases:
        return
    drawn, held = (
        [picture.sha256 for picture in record.rounds[0].pictures]
        for record in (baseline, cases[BASELINE].record)
    )
    if drawn != held:
        raise StoreError(
            f"the baseline's images differ from those of {path}, so nothing can be added to it; give --record another "
            f"file"
        )


def _rounded(value: Any) -> Any:
    """Round floats to six digits, since records are read by people and kept in the repository."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
