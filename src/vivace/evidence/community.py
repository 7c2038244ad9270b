"""Tables that owners of cards contributed: the files in results/community/, checked, as they ship with vivace.

`python -m benchmarks.community_tables` writes the file from those under results/community/.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from vivace.evidence.committed import TABLES
from vivace.evidence.tables import EvidenceTable

FILE = "community.json"


@cache
def community_tables() -> tuple[EvidenceTable, ...]:
    return TABLES.validate_json(resources.files("vivace.evidence").joinpath(FILE).read_bytes())
