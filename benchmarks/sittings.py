"""The record of a study: its sittings, taken from a store or from other records, and written to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vivace.benchmark.store import Store
from vivace.evidence.studies.expand import ModelPart
from vivace.evidence.studies.sittings import Sitting, SittingRow, conditions_of
from vivace.foundation.spec.recipe_syntax import unpinned
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.trial import Model
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.destinations import replace


def with_row(sitting: Sitting, row: SittingRow) -> Sitting:
    """Return the sitting with one more row, in place of an earlier one of the same recipe."""
    others = tuple(other for other in sitting.rows if other.recipe.text != row.recipe.text)
    return sitting.model_copy(update={"rows": (*others, row)})


def write_sittings(path: Path, sittings: Iterable[Sitting]) -> None:
    """Write a record atomically: a sitting's head in one line, then one line for each row."""
    texts = []
    for sitting in sittings:
        unknown = {"ceilings"} if sitting.ceilings is None else set()
        head = sitting.model_dump(mode="json", exclude={"rows", *unknown})
        lines = ",\n".join(json.dumps(_compact(row)) for row in sitting.rows)
        texts.append(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}')
    replace(path, ("[\n" + ",\n".join(texts) + "\n]\n").encode())


def _compact(row: SittingRow) -> dict[str, Any]:
    """Return a row without its round's empty fields."""
    return {
        "recipe": row.recipe.model_dump(mode="json"),
        "round": row.round.model_dump(mode="json", exclude_defaults=True),
    }


def of_records(records: Sequence[Record], baselines: Iterable[str], source: str) -> list[Sitting]:
    """Return sittings from records in the order of measurement, each baseline before the rows beside it.

    Rows before the first baseline are left out: nothing was measured beside them.

    Args:
        baselines: recipes in canonical form.
        source: see `Sitting`.
    """
    sittings: list[Sitting] = []
    latest: dict[tuple[Model, Workload], list[int]] = {}
    for record in records:
        trial = record.trial
        if trial.recipe.text in baselines:
            latest[trial.model, trial.workload] = [len(sittings) + k for k in range(len(record.rounds))]
            sittings += [
                Sitting(
                    environment=record.environment,
                    model=trial.model,
                    workload=trial.workload,
                    device=trial.device,
                    rows=(),
                    source=source,
                )
                for _ in record.rounds
            ]
        for place, round_ in zip(latest.get((trial.model, trial.workload), ()), record.rounds, strict=False):
            sittings[place] = with_row(sittings[place], SittingRow(recipe=trial.recipe, round=round_))
    return sittings


def of_store(store: Store, planned: Sequence[ModelPart]) -> list[Sitting]:
    """Return the sittings in a store of these parts, e.g. after `vivace study 001 --synthetic --store ...`.

    Rounds with one index in one environment were measured beside each other.
    """
    recipes = {unpinned(case.recipe) for model_part in planned for case in model_part.cases}
    measured = [
        (located.model, workload)
        for model_part in planned
        for located, workload in [conditions_of(model_part)]
    ]
    keys = dict.fromkeys(key for run in store.runs() for key in run.keys)
    sittings: dict[tuple[str, Model, Workload, int], Sitting] = {}
    for record in (record for key in keys if (record := store.record(key)) is not None):
        trial = record.trial
        if (trial.model, trial.workload) not in measured or unpinned(trial.recipe.text) not in recipes:
            continue
        for round_ in record.rounds:
            place = (record.environment.digest(), trial.model, trial.workload, round_.index)
            sitting = sittings.get(place) or Sitting(
                environment=record.environment,
                model=trial.model,
                workload=trial.workload,
                device=trial.device,
                rows=(),
            )
            row = SittingRow(recipe=trial.recipe, round=round_.model_copy(update={"pictures": ()}))
            sittings[place] = with_row(sitting, row)
    return list(sittings.values())
