"""What torch.profiler hands out of a profile on a GPU (`kineto_results`), of known content. Times in nanoseconds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

_ZERO = 1_795_562_232_151_961_855  # of the epoch: too large for a float's 53 bits
_PID = 4711
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}


@dataclass
class Event:
    """One of `events()`: the methods that both PyTorch 2.11 and 2.13 have."""

    label: str
    begin: int
    length: int
    device: DeviceType = DeviceType.CPU
    index: int = _PID
    resource: int = _PID
    correlation: int = 0
    annotation: bool = False
    metadata: str = ""

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin

    def duration_ns(self) -> int:
        return self.length

    def device_type(self) -> DeviceType:
        return self.device

    def device_index(self) -> int:
        return self.index

    def device_resource_id(self) -> int:
        return self.resource

    def correlation_id(self) -> int:
        return self.correlation

    def is_user_annotation(self) -> bool:
        return self.annotation

    def metadata_json(self) -> str:
        return self.metadata


def event(
    label: str, begin: int, length: int, *, is_gpu: bool = False, correlation: int = 0, metadata: str = ""
) -> Event:
    device, index = (DeviceType.CUDA, 0) if is_gpu else (DeviceType.CPU, _PID)
    return Event(label, begin, length, device, index, correlation=correlation, metadata=metadata)


@dataclass
class Results:
    """The events, and allocations below one node of the event tree."""

    recorded: list[Event]
    allocations: list[Any] = field(default_factory=list)

    def trace_start_ns(self) -> int:
        return _ZERO

    def events(self) -> list[Event]:
        return self.recorded

    def experimental_event_tree(self) -> list[Any]:
        return [SimpleNamespace(name="vivace call", children=self.allocations)]


def results_of(chrome: Iterable[Mapping[str, Any]]) -> Results:
    """Return the profile whose Chrome trace has these events (whole nanoseconds; those of a GPU included)."""
    results = Results([])
    for entry in chrome:
        begin = _ZERO + round(entry["ts"] * 1000)
        args = entry.get("args", {})
        if entry["name"] == "[memory]":
            is_cuda = args["Device Type"] == 1
            results.recorded.append(
                Event(
                    "[memory]", begin, 0, DeviceType.CUDA if is_cuda else DeviceType.CPU, 0 if is_cuda else -1
                )
            )
            results.allocations.append(_allocation(begin, args, "cuda" if is_cuda else "cpu"))
            continue
        category, is_gpu = entry["cat"], entry["cat"] in _ON_GPU
        results.recorded.append(
            Event(
                entry["name"],
                begin,
                round(entry["dur"] * 1000),
                DeviceType.CUDA if is_gpu else DeviceType.CPU,
                args.get("device", 0) if is_gpu else -1 if category == "overhead" else _PID,
                entry["tid"],
                args.get("correlation", 7),
                "annotation" in category,
            )
        )
    return results


def _allocation(begin: int, args: Mapping[str, Any], device: str) -> Any:
    fields = SimpleNamespace(
        alloc_size=args["Bytes"],
        ptr=args["Addr"],
        total_allocated=args["Total Allocated"],
        device=torch.device(device),
    )
    return SimpleNamespace(name="[memory]", children=[], start_time_ns=begin, extra_fields=fields)
