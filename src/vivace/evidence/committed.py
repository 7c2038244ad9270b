"""The records that ship with vivace: random weights at full size on a GPU, and embedded models with their images.

`python -m benchmarks.known_figures` writes the file from the records under results/.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from pydantic import TypeAdapter

from vivace.evidence.tables import EvidenceTable

FILE = "committed.json"
TABLES = TypeAdapter(tuple[EvidenceTable, ...])


@cache
def committed_tables() -> tuple[EvidenceTable, ...]:
    return TABLES.validate_json(resources.files("vivace.evidence").joinpath(FILE).read_bytes())
