"""Shared set-up: one thread, no network, pictures that can be compared."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

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


@pytest.fixture(scope="session", autouse=True)
def _workers_last() -> Iterator[None]:
    """Benches of many tests fork their rounds from one worker process: to start one takes seconds.

    It has only imported, so it has nothing to remember of an earlier test. What it reads of its surroundings is the
    environment, so another environment gets another worker. Tests of the worker's own life start theirs.
    """
    from vivace.benchmark import launcher, studies
    from vivace.measure.environment import DRIVER

    class Lasting(launcher.Launcher):
        def __exit__(self, *_: object) -> None:
            pass

    # What a quality pass imports for seconds in each of its forks.
    warm = (
        sys.executable,
        "-c",
        "import torchmetrics; from vivace.benchmark.worker import main; main()",
    )
    start = studies.start_launcher
    kept: dict[object, Lasting] = {}

    def start_or_take(device: str, worker: Sequence[str] = launcher.WORKER) -> launcher.Launcher:
        if device != "cpu" and DRIVER.exists():
            return start(device, worker)
        surroundings = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        key = (tuple(worker), tuple(sorted(surroundings.items())))
        if key not in kept:
            while len(kept) > 1:  # each holds half a gigabyte
                kept.pop(next(iter(kept))).close()
            kept[key] = Lasting(warm if worker == launcher.WORKER else worker, tries_gpu=False)
        return kept[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(studies, "start_launcher", start_or_take)
        yield
    for one in kept.values():
        one.close()
