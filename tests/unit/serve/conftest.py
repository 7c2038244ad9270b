"""Servers whose workers draw one colour and do what prompts say; see tests/serve_worker.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import Served, fake


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A server for one test."""
    with fake(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests whose requests leave nothing behind."""
    with fake(tmp_path_factory.mktemp("plain")) as running:
        yield running
