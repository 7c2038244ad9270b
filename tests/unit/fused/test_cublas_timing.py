"""Which of cuBLASLt's algorithms is taken, with a clock that the test sets."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
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


class Proposals:
    """A plan, whose algorithms have names and may write other bits than the first."""

    def __init__(self, *names: bytes, splits: bytes = b"") -> None:
        self.algorithms = [SimpleNamespace(algorithm=name) for name in names]
        self._splits, self.num_calls = splits, 0

    def __call__(self, out: torch.Tensor, index: int) -> None:
        self.num_calls += 1
        out.fill_(7.0 if self.algorithms[index].algorithm == self._splits else 3.0)


KIND = cublas_lt.Kind(4140, 3072, 4096, 4096, 3072, quantizes=False)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plans that were timed; the second of their algorithms is the fastest."""
    plans: list[Any] = []
    monkeypatch.setattr(cublas_lt, "_timed", lambda plan, _: plans.append(plan) or 1)
    monkeypatch.setattr(cublas_lt, "_fastest_alike", {})
    return plans


def chosen(plan: Proposals, kind: cublas_lt.Kind = KIND, device: int = 0) -> int:
    out = torch.zeros(4, dtype=torch.bfloat16)
    return cublas_lt._fastest_of(plan, kind, device, (out,))


def test_another_number_of_rows_takes_the_same_algorithm_without_timing(timed: list[Any]) -> None:
    first, other = Proposals(b"a", b"b", b"c"), Proposals(b"c", b"a", b"b")
    assert chosen(first) == 1
    assert chosen(other, replace(KIND, rows=4200)) == 2
    assert timed == [first]
    assert other.num_calls == 2, "of the first and of the one that was the fastest"


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        (replace(KIND, rows=4225), 0),  # a tile more
        (replace(KIND, outputs=9216), 0),
        (replace(KIND, quantizes=True), 0),
        (KIND, 1),
    ],
)
def test_what_is_not_alike_is_timed(timed: list[Any], kind: cublas_lt.Kind, device: int) -> None:
    chosen(Proposals(b"a", b"b"))
    chosen(Proposals(b"a", b"b"), kind, device)
    assert len(timed) == 2


@pytest.mark.parametrize("plan", [Proposals(b"a", b"c"), Proposals(b"c", b"b", splits=b"b")])
def test_it_is_timed_where_that_algorithm_is_not_proposed_or_writes_other_bits(
    timed: list[Any], plan: Proposals
) -> None:
    chosen(Proposals(b"a", b"b"))
    assert chosen(plan, replace(KIND, rows=4200)) == 1
    assert len(timed) == 2
