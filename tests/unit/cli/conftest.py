"""Commands in a folder of the test's own."""

from functools import partial
from pathlib import Path

import pytest

from tests.typed import Run, run_vivace


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs `vivace ARGUMENTS` in a new folder, which is the test's current one too."""
    monkeypatch.chdir(tmp_path)
    return partial(run_vivace, tmp_path)
