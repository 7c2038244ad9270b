"""Shared set-up: one thread, no network, pictures that can be compared."""

import os
import tempfile

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled code is kept between runs of the tests, and not among the user's own.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"vivace-tests-inductor-{os.getuid()}")
)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that a test keeps may be found again by another run."""
    os.environ["VIVACE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
