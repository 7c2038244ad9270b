"""The records in a store that prove what a recipe does: its own and its baseline's, of one run."""

from __future__ import annotations

from pathlib import Path

from vivace.benchmark.store import Store
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.trial import Model


def proving_records(folder: Path, model: Model, recipe: str) -> tuple[Record, ...]:
    """Return the baseline's record and the recipe's from the newest run that measured both; empty if there is none.

    Args:
        folder: of a store, which need not exist.
        recipe: its canonical text.

    Raises:
        StoreError: the folder has a store that cannot be read.
    """
    if not (folder / "records.sqlite").is_file():
        return ()
    with Store.read_only(folder) as store:
        for compared in store.comparisons(repeated=True):
            records = compared.records
            own = [r for r in records[1:] if r.trial.model == model and r.trial.recipe.text == recipe]
            if own and records[0].outcome is own[0].outcome is Outcome.MEASURED:
                return records[0], own[0]
    return ()
