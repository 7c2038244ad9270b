"""Name the lines of Python at which the host waits for the GPU or copies from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vivace.foundation.spec.profiling import HostWait

SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
)
READS = ("aten::_local_scalar_dense",)
_LIBRARY = ("torch/", "contextlib.py", "functools.py", "<built-in")


@dataclass(frozen=True)
class PythonCall:
    """A call in Python while it was traced. Times in nanoseconds.

    Attributes:
        file, line, function: where the call is made; of a Python function also where it begins.
        is_exact: whether `line` is the line of the call; else it is the first line of `function`.
    """

    start: int
    end: int
    file: str
    line: int
    function: str
    is_exact: bool


@dataclass(frozen=True)
class Wait:
    """A CUDA call that waits, a copy to the host, or a value that is read. Times in nanoseconds."""

    kind: str
    what: str
    component: str
    start: int
    end: int
    num_bytes: int = 0


def located(waits: Iterable[Wait], calls: Sequence[PythonCall]) -> list[HostWait]:
    """Return the waits by place, the longest first.

    Args:
        calls: of the thread that waits; those around a wait are its callers. Lines in PyTorch itself are passed over
            for the line that called it.
    """
    groups: dict[tuple[str, str, str, str, int, str, bool], list[Wait]] = defaultdict(list)
    ordered = sorted(calls, key=lambda call: (call.start, -call.end))
    stack: list[PythonCall] = []
    index = 0
    for wait in sorted(waits, key=lambda wait: wait.start):
        while index < len(ordered) and ordered[index].start <= wait.start:
            while stack and stack[-1].end < ordered[index].start:
                stack.pop()
            stack.append(ordered[index])
            index += 1
        around = [call for call in stack if call.end >= wait.start][::-1]
        place = next((call for call in around if not call.file.startswith(_LIBRARY)), None)
        place = place or next(iter(around), PythonCall(0, 0, "?", 0, "?", False))
        key = (wait.kind, wait.what, wait.component, place.file, place.line, place.function, place.is_exact)
        groups[key].append(wait)
    rows = [
        HostWait(
            kind=kind,
            what=what,
            component=component,
            file=file,
            line=line,
            function=function,
            is_exact=is_exact,
            count=len(waits_),
            seconds=sum(wait.end - wait.start for wait in waits_) / 1e9,
            num_bytes=sum(wait.num_bytes for wait in waits_),
        )
        for (kind, what, component, file, line, function, is_exact), waits_ in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.file, row.line))
