"""Events of a torch.profiler trace, read from the profiler's own list.

`trace.events()` makes a Python object of each and sorts them into a tree, which for the 190,000 events of an image of
SDXL takes longer than the image.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class RawHostEvent(NamedTuple):
    """An operator or a label on the host; times in nanoseconds."""

    name: str
    thread: int
    start: int
    end: int

    def encloses(self, other: RawHostEvent) -> bool:
        return self.thread == other.thread and self.start <= other.start and other.end <= self.end


def host_events(trace: Any) -> list[RawHostEvent]:
    """Return the host's events, those of a thread in order, each before what it encloses."""
    from torch.autograd import DeviceType

    events = [
        RawHostEvent(
            event.name(), event.start_thread_id(), event.start_ns(), event.start_ns() + event.duration_ns()
        )
        for event in _events(trace)
        if event.device_type() == DeviceType.CPU
    ]
    return sorted(events, key=lambda event: (event.thread, event.start, -event.end))


def ranges_on(device: Any, trace: Any) -> list[tuple[int, int]]:
    """Return start and end, in nanoseconds, of all events on a kind of device (`torch.autograd.DeviceType`)."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in _events(trace)
        if event.device_type() == device
    ]


def _events(trace: Any) -> Any:
    return trace.profiler.kineto_results.events()
