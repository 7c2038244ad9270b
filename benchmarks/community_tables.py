"""Write what owners of cards contributed into the package, for `vivace recommend`.

python -m benchmarks.community_tables           write src/vivace/evidence/community.json
python -m benchmarks.community_tables --check   exit 1 if it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from vivace.evidence.committed import TABLES
from vivace.evidence.community import FILE, tables_of
from vivace.evidence.lint.contributions import read_contribution
from vivace.foundation.spec.contribution import MAX_BYTES
from vivace.foundation.untrusted.files import read_object

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "community"
TARGET = ROOT / "src" / "vivace" / "evidence" / FILE


def content() -> str:
    """Return the tables of all contributions, as JSON."""
    tables = []
    for path in sorted(FOLDER.glob("*.json")):
        tables += tables_of(read_contribution(read_object(path, MAX_BYTES)), path.name)
    return TABLES.dump_json(tuple(tables), indent=1, exclude_defaults=True).decode() + "\n"


def main() -> int:
    is_current = TARGET.read_text(encoding="utf-8") == content()
    if "--check" in sys.argv:
        return 0 if is_current else 1
    TARGET.write_text(content(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
