"""Take a trace apart: by operator, kernel, family and component, the GPU's gaps, and memory over time."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from vivace.foundation.spec.profiling import CALL, Gap, KernelTime, MemoryTimeline, OperatorTime, Share
from vivace.measure.profiling.trace import DeviceEvent, HostEvent, Trace, component_at, covered, union

END = "the end of the call"
BEFORE = "before the call"
_US = 1e-6
_MAX_POINTS = 240
_WAITS = ("Synchronize", "cudaEventQuery")
FAMILIES = (
    "GEMM",
    "convolution",
    "attention",
    "norm",
    "elementwise",
    "copy",
    "communication",
    "Python",
    "CUDA calls",
    "other",
)
PYTHON, CUDA_CALLS, OTHER = FAMILIES[-3:]
# The first match decides. Softmax occurs only in attention here.
_PATTERNS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("communication", r"nccl|c10d::|all_?gather|all_?reduce|all_?to_?all|broadcast_coalesced|symm_mem"),
        ("attention", r"attention|attn|flash|fmha|sdpa|softmax"),
        ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col"),
        ("norm", r"(layer|group|batch|rms|instance)_?norm|_norm_|norm_kernel|RowwiseMoments|welford"),
        (
            "GEMM",
            r"gemm|gemv|cublas|cutlass|nvjet|splitk|wgmma|(?:^|::|_)(?:addmm|bmm|mm|matmul|linear|baddbmm|einsum)\b"
            r"|scaled_mm|int_mm|triton_\w*(?:mm|matmul)\b|s\d{4,5}(?:gemm|tensorop)",
        ),
        (
            "copy",
            r"memcpy|memset|::(?:copy_|_to_copy|to|clone|contiguous|cat|stack|pad|empty\w*|zeros?\w*|fill_|full"
            r"|index\w*|gather|_local_scalar_dense|item|constant_pad_nd|repeat\w*|roll|select_scatter|arange"
            r"|upsample\w*|nonzero|masked_\w+|embedding)\b|CatArray|copy_kernel|upsample|FillFunctor|index\w*_kernel"
            r"|embedding",
        ),
        ("elementwise", r"elementwise|triton_poi|pointwise"),
        (
            "elementwise",
            r"::(?:add|sub|rsub|mul|div|silu|gelu|relu|sigmoid|tanh|exp|log|sqrt|rsqrt|pow|neg|sin|cos|clamp\w*|round"
            r"|where|abs|lerp|addcmul|addcdiv|reciprocal|maximum|minimum|eq|ne|lt|le|gt|ge|bitwise_\w+|logical_\w+"
            r"|mean|sum|amax|amin|cumprod|cumsum|std|var|normal|randn|any|all|floor\w*|ceil|square)_?\b",
        ),
    )
)
_VIEWS = re.compile(
    r"::(?:view|_unsafe_view|reshape|_reshape_alias|permute|transpose|t|expand|as_strided|slice|select|squeeze"
    r"|unsqueeze|chunk|split\w*|unbind|detach\w*|lift_fresh|alias|flatten|unflatten|narrow|resolve_\w+|movedim)_?$"
)


@dataclass
class _Sum:
    family: str
    self_cpu: float = 0.0
    cpu: float = 0.0
    self_cuda: float = 0.0
    cuda: float = 0.0
    calls: int = 0


def operators(trace: Trace, others: Sequence[Trace] = ()) -> list[OperatorTime]:
    """Return the operator table, whose self times add up to the time of the host's threads and to that of the kernels.
    A kernel without an operator, such as one of a CUDA graph, has a row under its own name."""
    sums = _sums(trace)
    is_gpu = bool(trace.device)
    every = [sums, *map(_sums, others)]
    rows = []
    for name, sums_of_operator in sums.items():
        empty = _Sum("")
        each = [getattr(sums.get(name, empty), "self_cuda" if is_gpu else "self_cpu") for sums in every]
        rows.append(
            OperatorTime(
                name=name,
                family=sums_of_operator.family,
                self_cpu_s=sums_of_operator.self_cpu * _US,
                cpu_s=sums_of_operator.cpu * _US,
                self_cuda_s=sums_of_operator.self_cuda * _US,
                cuda_s=sums_of_operator.cuda * _US,
                num_calls=sums_of_operator.calls,
                least_s=min(each) * _US,
                most_s=max(each) * _US,
            )
        )
    key = "self_cuda_s" if is_gpu else "self_cpu_s"
    return sorted(rows, key=lambda row: (-getattr(row, key), -row.self_cpu_s, row.name))


def _sums(trace: Trace) -> dict[str, _Sum]:
    sums: dict[str, _Sum] = {CALL: _Sum(PYTHON)}
    for event in trace.host:
        row = sums[CALL] if event.kind == "label" else _row(sums, event)
        row.self_cpu += event.self_us
        if event.kind == "label":
            if event.parent is None:
                row.cpu += event.end - event.start
                row.calls += 1
            continue
        row.calls += 1
        if all(around.name != event.name for around in event.ancestors()):
            row.cpu += event.end - event.start
    for device_event in trace.device:
        took = device_event.end - device_event.start
        launcher = _operator_of(device_event)
        if launcher is None:
            row = sums.setdefault(device_event.name, _Sum(family_of_kernel(device_event.name, None)))
            row.calls += 1
            row.cuda += took
        else:
            row = _row(sums, launcher)
            for name in {launcher.name, *(around.name for around in launcher.ancestors())}:
                sums[name].cuda += took
        row.self_cuda += took
    sums[CALL].cuda = sum(event.end - event.start for event in trace.device)
    return sums


def kernels(trace: Trace) -> list[KernelTime]:
    """Return the time of the GPU's kernels, copies and memsets by name, the longest first."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    families_ = _Families()
    for event in trace.device:
        sums[event.name, families_.of_device(event)].append((event.end - event.start) * _US)
    rows = [
        KernelTime(name=name, family=family, cuda_s=sum(times), num_calls=len(times))
        for (name, family), times in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.cuda_s, row.name))


def families(trace: Trace) -> list[Share]:
    """Return the self time of host and GPU by family, the largest first."""
    names = _Families()
    return _shares(trace, names.of_host, names.of_device)


def components(trace: Trace) -> list[Share]:
    """Return the self time of host and GPU by component, the largest first."""
    return _shares(trace, lambda event: event.component, lambda event: event.component)


def _shares(
    trace: Trace, of_host: Callable[[HostEvent], str], of_device: Callable[[DeviceEvent], str]
) -> list[Share]:
    cpu: dict[str, float] = defaultdict(float)
    cuda: dict[str, float] = defaultdict(float)
    for event in trace.host:
        cpu[of_host(event)] += event.self_us
    for device_event in trace.device:
        cuda[of_device(device_event)] += device_event.end - device_event.start
    rows = [
        Share(name=name, cpu_s=cpu.get(name, 0.0) * _US, cuda_s=cuda.get(name, 0.0) * _US)
        for name in {**cuda, **cpu}
    ]
    return sorted(rows, key=lambda row: (-row.cuda_s, -row.cpu_s, row.name))


def busy_us(trace: Trace) -> float:
    """Return the time in which the GPU worked inside the call; work that overlaps counts once."""
    return covered((max(event.start, trace.start), event.end) for event in trace.device)


def gaps(trace: Trace) -> list[Gap]:
    """Return the GPU's idle time by the kernel that ended it, host delays first; empty on a CPU. The host is late from
    the moment that the GPU has nothing left until it launches the next kernel, unless it waits for the GPU. What
    remains of a gap is the launch itself, and kernels that wait for one another."""
    if not trace.device:
        return []
    waits = union(
        (event.start, event.end)
        for event in trace.host
        if event.kind == "cuda" and any(mark in event.name for mark in _WAITS)
    )
    sums: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    reached = trace.start
    for event in trace.device:
        if event.start > reached:
            launcher = event.launch
            until = event.start if launcher is None else min(event.start, max(reached, launcher.start))
            before = event.name
            if launcher is not None:
                before = (launcher.path() or [launcher.name])[0]
            late = until - reached - _shared((reached, until), waits)
            sums[event.component, before].append((event.start - reached, late))
        reached = max(reached, event.end)
    if trace.end > reached:
        late = trace.end - reached - _shared((reached, trace.end), waits)
        last = max(trace.device, key=lambda event: event.end)
        sums[last.component, END].append((trace.end - reached, late))
    rows = [
        Gap(
            component=component,
            before=before,
            count=len(gaps_of_place),
            idle_s=sum(idle for idle, _ in gaps_of_place) * _US,
            host_late_s=sum(late for _, late in gaps_of_place) * _US,
        )
        for (component, before), gaps_of_place in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.host_late_s, -row.idle_s))


def memory(trace: Trace) -> MemoryTimeline | None:
    """Return the allocated bytes over the call, of the GPU if the trace has any of it; None without allocations."""
    is_cuda = any(event.is_cuda for event in trace.memory)
    events = [event for event in trace.memory if event.is_cuda is is_cuda]
    if not events:
        return None
    spans = component_at(trace)
    before = events[0].total - events[0].num_bytes if is_cuda else 0
    held = before
    by_component: dict[str, int] = {BEFORE: before}
    live: dict[int, tuple[str, int]] = {}
    points: list[tuple[float, int]] = [(0.0, before)]
    peak, at_peak = before, dict(by_component)
    peaks: dict[str, int] = defaultdict(int)
    index = 0
    for event in events:
        while index < len(spans) and spans[index][1] <= event.at:
            index += 1
        now = spans[index][2] if index < len(spans) and spans[index][0] <= event.at else OTHER
        held += event.num_bytes
        if event.num_bytes >= 0:
            live[event.address] = (now, event.num_bytes)
            by_component[now] = by_component.get(now, 0) + event.num_bytes
        else:
            owner, _ = live.pop(event.address, (BEFORE, 0))
            by_component[owner] += event.num_bytes
        peaks[now] = max(peaks[now], held)
        points.append(((event.at - trace.start) * _US, held))
        if held > peak:
            peak, at_peak = held, dict(by_component)
    return MemoryTimeline(
        kind="CUDA tensors" if is_cuda else "CPU tensors",
        points=tuple(thinned(points)),
        before_bytes=before,
        peak_bytes=peak,
        at_peak_bytes={name: value for name, value in at_peak.items() if value},
        peak_by_component_bytes=dict(peaks),
    )


def thinned(points: Sequence[tuple[float, int]], most: int = _MAX_POINTS) -> list[tuple[float, int]]:
    """Return at most `most` points, of each stretch of time the largest, and the last one."""
    if len(points) <= most:
        return list(points)
    length = max(points[-1][0], 1e-9)
    best: dict[int, tuple[float, int]] = {}
    for point in points[:-1]:
        bin_ = min(most - 2, int(point[0] / length * (most - 1)))
        if bin_ not in best or point[1] > best[bin_][1]:
            best[bin_] = point
    return [*best.values(), points[-1]]


def _row(sums: dict[str, _Sum], event: HostEvent) -> _Sum:
    if event.name not in sums:
        family = CUDA_CALLS if event.kind == "cuda" else family_of(event.name) or OTHER
        sums[event.name] = _Sum(family)
    return sums[event.name]


def _operator_of(event: DeviceEvent) -> HostEvent | None:
    if event.launch is None:
        return None
    around = (event.launch, *event.launch.ancestors())
    return next((event for event in around if event.kind == "operator"), None)


class _Families:
    """Families of a trace's events, each looked up once: the events around one decide first."""

    def __init__(self) -> None:
        self._known: dict[HostEvent, str | None] = {}

    def of_host(self, event: HostEvent) -> str:
        if event.kind == "label":
            return PYTHON
        return CUDA_CALLS if event.kind == "cuda" else self._of_operators(event) or OTHER

    def of_device(self, event: DeviceEvent) -> str:
        return family_of_kernel(
            event.name, None if event.launch is None else self._of_operators(event.launch)
        )

    def _of_operators(self, event: HostEvent) -> str | None:
        """Return the family by the operators around an event and by its own name; None if unknown."""
        left = []
        ancestor: HostEvent | None = event
        while ancestor is not None and ancestor not in self._known:
            left.append(ancestor)
            ancestor = ancestor.parent
        family = None if ancestor is None else self._known[ancestor]
        for ancestor in reversed(left):
            if family is None and ancestor.kind == "operator":
                family = family_of(ancestor.name)
            self._known[ancestor] = family
        return family


def _shared(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    index = bisect_right(others, span[0], key=lambda other: other[1])
    total = 0.0
    while index < len(others) and others[index][0] < span[1]:
        total += min(span[1], others[index][1]) - max(span[0], others[index][0])
        index += 1
    return total


@cache
def family_of(name: str) -> str | None:
    """Return the family of an operator's or kernel's name; None if the name does not tell."""
    if _VIEWS.search(name):
        return None
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), None)


def family_of_kernel(name: str, family: str | None) -> str:
    """Return the family of a kernel, copy or memset on a GPU."""
    own = family_of(name)
    if own == "communication" or name.startswith(("Memcpy", "Memset")):
        return own or "copy"
    return family or own or OTHER
