"""Shared set-up: one thread, no network, comparable images."""

import gc
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The command line sets it. Environments with and without it would have a worker each.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Compiled code is kept between test runs, outside the user's own cache.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"vivace-tests-inductor-{getattr(os, 'getuid', os.getlogin)()}"),
)

gc.disable()  # what is imported stays: see `pytest_collection_finish`


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `long` the cases that `diagonal`, `quick` and `slow` leave out of `make test`, and as `soak` those that
    `exhaustive` leaves to `make soak`."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    is_whole = not any("::" in argument for argument in config.args)
    for name, cases in functions.items():
        ids = [case.callspec.id for case in cases]
        for marker in cases[0].iter_markers():
            patterns = marker.args if marker.name in ("quick", "slow", "exhaustive") and is_whole else ()
            stale = [pattern for pattern in patterns if not any(fnmatchcase(id_, pattern) for id_ in ids)]
            if stale:
                raise pytest.UsageError(f"{name}: {marker.name} names no case with {stale}; there are {ids}")
        for case in cases:
            if any(_leaves_out(marker, case) for marker in case.iter_markers()):
                case.add_marker(pytest.mark.long)
            for marker in case.iter_markers("exhaustive"):
                if any(fnmatchcase(case.callspec.id, pattern) for pattern in marker.args):
                    case.add_marker(pytest.mark.soak)
        _leave_to_soak(cases)


NUM_LONG_CASES = 3
"""Of a test's long cases, so many are run by `make test-long`, spread over them; `make soak` runs all."""


def _leave_to_soak(cases: Sequence[pytest.Function]) -> None:
    long = [case for case in cases if case.get_closest_marker("long") and not case.get_closest_marker("soak")]
    last = len(long) - 1
    kept = {round(last * number / (NUM_LONG_CASES - 1)) for number in range(NUM_LONG_CASES)}
    for number, case in enumerate(long):
        if number not in kept:
            case.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Leave what was imported out of later garbage collections, which would take a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # a copy of a pipeline has as many objects
    gc.enable()


def _leaves_out(marker: pytest.Mark, case: pytest.Function) -> bool:
    """Return whether a marker makes this case of a parametrised test a long one."""
    if marker.name == "diagonal":
        axes = [len(parametrize.args[1]) for parametrize in case.iter_markers("parametrize")]
        indices = list(itertools.product(*map(range, axes)))[next(iter(case.callspec.indices.values()))]
        step = indices[axes.index(max(axes))]
        return any(index != step % size for index, size in zip(indices, axes, strict=True))
    if marker.name not in ("quick", "slow"):
        return False
    is_named = any(fnmatchcase(case.callspec.id, pattern) for pattern in marker.args)
    return is_named is (marker.name == "slow")


@pytest.fixture(autouse=True)
def _quick_convolutions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in 16 bits take as long as in fp32 (tests/half_precision.py)."""
    from tests.half_precision import quick_convolutions

    if request.node.get_closest_marker("own_convolutions") is None:
        quick_convolutions(monkeypatch)


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX draws 96 px by default. Its images are as varied as those of 128 px, in two thirds of the time."""
    from tests.families import SIDES

    monkeypatch.setitem(SIDES, "flux", 96)


@pytest.fixture
def short_calls(small_images: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images in two thirds of the steps, for tests in which the number of steps does not matter."""
    from tests.families import STEPS

    for family, steps in {"sd": 2, "sdxl": 2, "flux": 4}.items():
        monkeypatch.setitem(STEPS, family, steps)


@pytest.fixture(scope="session", autouse=True)
def _temporary_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a temporary cache, so that no run finds what another one stored."""
    os.environ["VIVACE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _workers_last(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share one worker process between the benches of many tests: see tests/shared_worker.py.

    Tests of a worker's start and end use their own.
    """
    from tests.copies import read_embedded_models_once
    from tests.shared_worker import SharedWorker, module_of
    from vivace.benchmark import cache_calibration, pairs, profiles, studies
    from vivace.benchmark.rounds.worker_requests import WORKER
    from vivace.measure.this_environment import DRIVER
    from vivace.tuning import tuner

    read_embedded_models_once()
    start = studies.start_launcher
    shared: list[SharedWorker] = []

    def start_or_share(device: str, worker: Sequence[str] = WORKER) -> Any:
        if (device != "cpu" and DRIVER.exists()) or os.environ.get("VIVACE_NO_FORK"):
            return start(device, worker)
        try:
            module = module_of(tuple(worker))
        except KeyError:
            return start(device, worker)
        if not shared:
            shared.append(SharedWorker(tmp_path_factory.mktemp("shared-worker")))
        return shared[0].launcher(module)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for user in (studies, cache_calibration, pairs, profiles, tuner):
            monkeypatch.setattr(user, "start_launcher", start_or_share)
        yield
    for resident in shared:
        resident.close()
