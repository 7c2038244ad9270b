"""Read the Chrome trace that torch.profiler writes, by other code than `vivace.measure.profiling.profiler`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from vivace.measure.profiling import breakdown
from vivace.measure.profiling.trace import LABEL, DeviceEvent, HostEvent, MemoryEvent, Trace, trace_of

_HOST = {"cpu_op": "operator", "user_annotation": "operator", "cuda_runtime": "cuda", "cuda_driver": "cuda"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def read_chrome_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Return the profiled call from the `traceEvents` of a Chrome trace."""
    host: list[HostEvent] = []
    device: list[DeviceEvent] = []
    memory: list[MemoryEvent] = []
    for event in events:
        category, args = event.get("cat", ""), event.get("args") or {}
        if category in _HOST and event.get("ph") == "X":
            name, start = event["name"], event["ts"]
            kind = "label" if name.startswith(LABEL) else _HOST[category]
            correlation = args["correlation"] if kind == "cuda" else None
            host.append(HostEvent(name, kind, start, start + event["dur"], event["tid"], correlation))
        elif category in _DEVICE:
            start = event["ts"]
            device.append(DeviceEvent(event["name"], start, start + event["dur"], args.get("correlation")))
        elif category == "cpu_instant_event" and event.get("name") == "[memory]":
            is_cuda = args["Device Type"] == 1
            memory.append(
                MemoryEvent(event["ts"], args["Bytes"], args["Addr"], args["Total Allocated"], is_cuda)
            )
    return trace_of(host, device, memory)


def assert_alike(actual: Trace, expected: Trace) -> None:
    """Assert that two readings of one profile agree, up to the half nanosecond that a Chrome trace's floats have."""
    assert [_outline(event) for event in actual.host] == [_outline(event) for event in expected.host]
    assert sorted(map(_launch, actual.device)) == sorted(map(_launch, expected.device))
    assert [(event.address, event.num_bytes, event.is_cuda) for event in actual.memory] == [
        (event.address, event.num_bytes, event.is_cuda) for event in expected.memory
    ]
    assert actual.end - actual.start == pytest.approx(expected.end - expected.start, abs=0.01)
    within = 1e-9 * (len(expected.host) + len(expected.device))
    assert breakdown.busy_us(actual) == pytest.approx(breakdown.busy_us(expected), abs=within * 1e6)
    for table in (breakdown.operators, breakdown.kernels, breakdown.families, breakdown.components):
        _assert_near(
            [row.model_dump() for row in table(actual)], [row.model_dump() for row in table(expected)], within
        )
    # By a Chrome trace's floats, a kernel that starts when another ends may leave a gap of nothing.
    _assert_near(
        *(
            [gap.model_dump(exclude={"count"}) for gap in breakdown.gaps(each) if gap.idle_s > within]
            for each in (actual, expected)
        ),
        within=within,
    )
    used, wanted_used = breakdown.memory(actual), breakdown.memory(expected)
    assert (used is None) == (wanted_used is None)
    if used is not None and wanted_used is not None:
        points = [held for _, held in used.points]
        assert points == [held for _, held in wanted_used.points]
        assert used.model_copy(update={"points": ()}) == wanted_used.model_copy(update={"points": ()})


def _assert_near(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], within: float) -> None:
    """Compare rows by what they are called; rows of nearly the same time may change places."""

    def named(rows: Sequence[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        return {tuple(value for value in row.values() if isinstance(value, str)): row for row in rows}

    by_name = named(expected)
    assert named(actual).keys() == by_name.keys()
    for name, row in named(actual).items():
        assert row == {
            key: pytest.approx(value, abs=within) if isinstance(value, float) else value
            for key, value in by_name[name].items()
        }


def _outline(event: HostEvent) -> tuple[str, str, str, list[str]]:
    return event.name, event.kind, event.component, event.path()


def _launch(event: DeviceEvent) -> tuple[str, str, list[str]]:
    return (
        event.name,
        event.component,
        [] if event.launch is None else [event.launch.name, *event.launch.path()],
    )
