"""Which of cuBLASLt's algorithms is taken, with a clock that the test sets."""

from collections import Counter
from typing import Any

import pytest
import torch

from vivace.machinery.fused import cublas_lt


class Clock:
    """Stands in for the GPU: algorithms take what the test says, and events read when they were recorded."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.now = 0.0
        self.calls: Counter[int] = Counter()

    def plan(self, *operands: Any) -> None:
        index = operands[-1]
        self.calls[index] += 1
        self.now += self.milliseconds[index]

    def event(self, **_: Any) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()


def fastest(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> int:
    numbers = list(range(len(clock.milliseconds)))
    monkeypatch.setattr(cublas_lt, "algorithms_like_the_first", lambda plan, operands: numbers)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return cublas_lt._timed(clock.plan, (None,) * 6)


def test_the_fastest_is_taken_and_the_slow_ones_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 0.9, 1.05, 2.0, 5.0)
    assert fastest(monkeypatch, clock) == 1
    calls = cublas_lt._CALLS + 1  # and one to warm up
    assert [clock.calls[index] for index in range(5)] == [3 * calls, 3 * calls, 3 * calls, calls, calls]


def test_a_single_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest(monkeypatch, Clock(3.0)) == 0
