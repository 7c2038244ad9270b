"""Speed-ups of techniques on a model, from the records that ship with vivace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.kin import kin_of
from vivace.evidence.tables import EvidenceTable


@dataclass(frozen=True)
class Speeds:
    """Speed-ups of techniques, each over the baseline of its record.

    Attributes:
        gains: by the recipe that was added to the baseline, canonical.
        gpu: where they were measured; "" if there are none.
    """

    gains: Mapping[str, float] = field(default_factory=dict)
    gpu: str = ""

    def of(self, recipe: str) -> float | None:
        """Return the speed-up of a recipe; None if unknown.

        Quantising other components than the denoiser hardly changes the time, so such records count as well.
        """
        try:
            parts = resolve(recipe)
        except RecipeError:
            return None
        plain = "+".join(technique.text.partition("@")[0] for technique in parts)
        for text in (parts.text, resolve(plain).text if all("denoiser" in t.targets for t in parts) else ""):
            if text in self.gains:
                return self.gains[text]
        return None


@cache
def known_speeds(model: str) -> Speeds:
    """Return the recorded speed-ups of a model on a GPU, or else of the models of its architecture."""
    tables = [table for table in committed_tables() if table.device == "cuda" and table.batch == 1]
    kin = kin_of(model, frozenset(table.model for table in tables))
    near = [table for table in tables if table.model == kin.name]
    near = near or [table for table in tables if kin.is_family(kin_of(table.model, frozenset({table.model})))]
    gains: dict[str, float] = {}
    for table in sorted(near, key=lambda table: -len(table.rows)):
        for text, gain in _added(table):
            gains.setdefault(text, gain)
    return Speeds(gains, near[0].gpu if near else "")


def _added(table: EvidenceTable) -> list[tuple[str, float]]:
    """Return each row's techniques beyond the table's baseline, and its speed-up."""
    common = {technique.text for technique in resolve(table.baseline)}
    gains = []
    for row in table.rows:
        if row.gain is None:
            continue
        try:
            extra = [technique.text for technique in resolve(row.recipe) if technique.text not in common]
            gains.append((resolve("+".join(extra) or "baseline").text, row.gain.point))
        except RecipeError:
            continue  # it needs the baseline's techniques, or is one that vivace had once
    return gains
