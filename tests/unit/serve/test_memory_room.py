"""Models that do not fit a GPU: an error in words, before they are loaded where that can be known."""

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vivace.errors import Unsupported
from vivace.recipes.resolve import resolve
from vivace.serve.queue.messages import Load
from vivace.serve.worker import main as worker
from vivace.serve.worker import speeds
from vivace.serve.worker.warm_session import Drawing, check_fits, memory_of

GB = 10**9
SESSION: Any = SimpleNamespace(defaults={"num_inference_steps": 20})


def test_what_plan_predicts_not_to_fit_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(
        Unsupported, match=r"flux-dev with baseline needs 37\.\d GB at 1024x1024, and this GPU has 24"
    ):
        check_fits("flux-dev", resolve("baseline"), (), None, 24 * GB)
    with pytest.raises(
        Unsupported,
        match=r"tiny-sd with dtype\(bf16\) needs 1\.\d GB at 128x128.*vivace plan tiny-sd --card 1",
    ):
        check_fits("tiny-sd", resolve("bf16"), (), None, GB)


def test_what_does_not_fit_a_machine_without_a_gpu_is_refused_before_it_is_loaded() -> None:
    assert memory_of("cpu") > GB
    with pytest.raises(Unsupported, match=r"needs 1578\.\d GB at 64000x64000, and this machine has 16\.0 GB"):
        check_fits("tiny-sd", resolve("baseline"), ((64000, 64000),), None, 16 * GB, "this machine")


def test_what_fits_as_published_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it takes seconds")

    monkeypatch.setattr("vivace.runtime.memory.remembered.predicted", predict)
    check_fits("synthetic:flux-dev", resolve("bf16"), ((1024, 1024),), None, 80 * GB)
    with pytest.raises(AssertionError, match="it takes seconds"):
        check_fits("flux-dev", resolve("bf16"), ((2048, 2048),), None, 80 * GB)


ALLOCATIONS = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"
    ),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20.00 MiB"),
]


@pytest.mark.parametrize("error", ALLOCATIONS)
def test_memory_that_runs_out_is_said_in_words_on_a_cpu_too(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(Drawing, "load", fail)
    events = io.StringIO()
    message = Load("sdxl", "baseline", "cuda", None, (), (), "/dev/shm")
    assert not worker._load(message, SimpleNamespace(drawing=None), events)
    (event,) = map(json.loads, events.getvalue().splitlines())
    assert event["event"] == "unusable"
    assert event["message"].startswith("sdxl with baseline does not fit the free memory")
    refused = worker._event_of(error)
    assert refused["event"] == "refused"
    assert "memory is not enough" in refused["message"]
    assert "GPU" not in refused["message"]
    seconds = iter([(1.0, [])])

    def timed(*args: Any) -> Any:
        try:
            return next(seconds)
        except StopIteration:
            raise error from None

    monkeypatch.setattr(speeds, "_timed", timed)
    assert speeds.time_batches(SESSION, 8, 8, (2, 4))["allowed"] == [], "two at once do not fit, and one does"
