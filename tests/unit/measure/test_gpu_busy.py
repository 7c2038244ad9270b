"""The time in which a GPU is busy."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vivace.measure.profiling.trace import covered, host_events


@pytest.mark.parametrize(
    ("ranges", "length"),
    [
        ([], 0),
        ([(0, 2), (1, 4)], 4),
        ([(0, 9), (1, 2), (3, 4)], 9),
        ([(5, 6), (0, 1), (0, 1)], 2),
    ],
)
def test_work_that_overlaps_counts_once(ranges: list[tuple[float, float]], length: float) -> None:
    assert covered(ranges) == length


def test_host_events_come_before_what_they_enclose() -> None:
    x = torch.zeros(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("outer"):
        torch.nn.functional.linear(x, x)
    outer, *inner = [
        event for event in host_events(trace) if event.name in ("outer", "aten::linear", "aten::mm")
    ]
    assert outer.name == "outer"
    assert [event.name for event in inner] == ["aten::linear", "aten::mm"]
    assert outer.encloses(inner[0])
    assert inner[0].encloses(inner[1])
    assert not inner[1].encloses(inner[0])
