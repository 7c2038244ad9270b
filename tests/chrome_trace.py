"""Read the Chrome trace that torch.profiler writes: slower than `vivace.profiling.torch_events`, and independent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from vivace.profiling import breakdown
from vivace.profiling.trace import LABEL, DeviceEvent, HostEvent, MemoryEvent, Trace, trace_of

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


def assert_alike(found: Trace, wanted: Trace) -> None:
    """Assert that two readings of one profile agree, up to the half nanosecond that a Chrome trace's floats have."""
    assert [_outline(one) for one in found.host] == [_outline(one) for one in wanted.host]
    assert sorted(map(_launch, found.device)) == sorted(map(_launch, wanted.device))
    assert [(one.address, one.num_bytes, one.is_cuda) for one in found.memory] == [
        (one.address, one.num_bytes, one.is_cuda) for one in wanted.memory
    ]
    assert found.end - found.start == pytest.approx(wanted.end - wanted.start, abs=0.01)
    within = 1e-9 * (len(wanted.host) + len(wanted.device))
    assert breakdown.busy_us(found) == pytest.approx(breakdown.busy_us(wanted), abs=within * 1e6)
    for table in (breakdown.operators, breakdown.kernels, breakdown.families, breakdown.components):
        _assert_near(
            [one.model_dump() for one in table(found)], [one.model_dump() for one in table(wanted)], within
        )
    # By a Chrome trace's floats, a kernel that starts when another ends may leave a gap of nothing.
    _assert_near(
        *(
            [one.model_dump(exclude={"count"}) for one in breakdown.gaps(each) if one.idle_s > within]
            for each in (found, wanted)
        ),
        within=within,
    )
    used, wanted_used = breakdown.memory(found), breakdown.memory(wanted)
    assert (used is None) == (wanted_used is None)
    if used is not None and wanted_used is not None:
        points = [held for _, held in used.points]
        assert points == [held for _, held in wanted_used.points]
        assert used.model_copy(update={"points": ()}) == wanted_used.model_copy(update={"points": ()})


def _assert_near(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], within: float) -> None:
    """Compare rows by what they are called; rows of nearly the same time may change places."""

    def named(rows: Sequence[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        return {tuple(value for value in row.values() if isinstance(value, str)): row for row in rows}

    by_name = named(wanted)
    assert named(found).keys() == by_name.keys()
    for name, row in named(found).items():
        assert row == {
            key: pytest.approx(value, abs=within) if isinstance(value, float) else value
            for key, value in by_name[name].items()
        }


def _outline(one: HostEvent) -> tuple[str, str, str, list[str]]:
    return one.name, one.kind, one.component, one.path()


def _launch(one: DeviceEvent) -> tuple[str, str, list[str]]:
    return one.name, one.component, [] if one.launch is None else [one.launch.name, *one.launch.path()]
