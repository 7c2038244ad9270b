"""Read the Chrome trace that torch.profiler writes: slower than `vivace.profiling.recorded`, and independent of it."""

from collections.abc import Iterable, Mapping
from typing import Any

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
