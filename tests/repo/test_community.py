"""What owners of cards contributed is as `vivace contribute` writes it, possible, and in the package."""

from pathlib import Path

import pytest

from benchmarks.community_tables import FOLDER, TARGET, content
from vivace.evidence.lint.check import checked
from vivace.evidence.lint.read_tables import read_tables
from vivace.foundation.spec.contribution import MAX_BYTES

FILES = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_contribution_is_possible(path: Path) -> None:
    assert path.suffix == ".json", "only contributions and the README are here"
    assert path.stat().st_size <= MAX_BYTES
    findings = [finding for table in read_tables(path) for finding in checked(table, {}).findings]
    assert not [finding for finding in findings if finding.severity == "impossible"]


def test_the_package_has_them() -> None:
    assert TARGET.read_text() == content()
