"""Shared set-up: one thread, no network, pictures that can be compared."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that a test keeps may be found again by another run."""
    os.environ["VIVACE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
