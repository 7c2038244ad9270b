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
from vivace.serve.worker.memory_room import check_fits
from vivace.serve.worker.warm_session import Drawing

GB = 10**9


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


def test_what_fits_as_published_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it takes seconds")

    monkeypatch.setattr("vivace.runtime.memory.remembered.predicted", predict)
    check_fits("synthetic:flux-dev", resolve("bf16"), ((1024, 1024),), None, 80 * GB)
    with pytest.raises(AssertionError, match="it takes seconds"):
        check_fits("flux-dev", resolve("bf16"), ((2048, 2048),), None, 80 * GB)


def test_a_model_that_fills_the_memory_while_it_is_loaded_ends_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(request: Load, report: Any) -> Drawing:
        raise MemoryError

    monkeypatch.setattr(Drawing, "load", load)
    events = io.StringIO()
    message = Load("sdxl", "baseline", "cuda", None, (), (), "/dev/shm")
    assert not worker._load(message, SimpleNamespace(drawing=None), events)
    (event,) = map(json.loads, events.getvalue().splitlines())
    assert event["event"] == "unusable"
    assert event["message"].startswith("sdxl with baseline does not fit the free memory")
