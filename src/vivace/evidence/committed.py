"""The tables that ship with vivace: of its own records, and of those that owners of cards contributed.

`python -m benchmarks.known_figures` writes the first file from the records under results/, and
`python -m benchmarks.community_tables` the second from results/community/.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from pydantic import TypeAdapter

from vivace.evidence.tables import EvidenceTable

FILE, COMMUNITY_FILE = "committed.json", "community.json"
TABLES = TypeAdapter(tuple[EvidenceTable, ...])


@cache
def committed_tables() -> tuple[EvidenceTable, ...]:
    return _read(FILE)


@cache
def community_tables() -> tuple[EvidenceTable, ...]:
    return _read(COMMUNITY_FILE)


def _read(name: str) -> tuple[EvidenceTable, ...]:
    return TABLES.validate_json(resources.files("vivace.evidence").joinpath(name).read_bytes())
