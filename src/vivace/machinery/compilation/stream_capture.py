"""Dependencies between captured nodes of a CUDA graph, through CUDA's driver: PyTorch has no call for it.

Source: NVIDIA, CUDA Driver API, "Stream Management" and "Graph Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vivace.errors import Unsupported

_ACTIVE, _REPLACE, _MEMSET = 1, 1, 2  # the values of cuda.h
_CALLS = (
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphAddDependencies_v2",
)

Node = int
"""The address of a graph's node."""


@dataclass(frozen=True)
class Capture:
    """A capture in progress, by its process-wide id, the address of its graph, and what the stream's next node waits
    for."""

    id: int
    graph: int
    awaited: tuple[Node, ...]


def capture_of(stream: int) -> Capture | None:
    """Return the capture in progress on a stream, or None; Unsupported where the driver does not tell."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, edges, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    pointers = [ctypes.byref(each) for each in (status, number, graph, nodes, edges, count)]
    _call("cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream), *pointers)
    if status.value != _ACTIVE:
        return None
    awaited = (ctypes.c_void_p * count.value).from_address(nodes.value) if nodes.value else ()
    return Capture(number.value, graph.value or 0, tuple(node for node in awaited if node))


class MemsetsBeside:
    """Captures launches of memsets and a kernel so that the memsets run in parallel with earlier work.

    They clear what kernels of this object's launches before have used, so they wait for the last of those, and for
    nothing else. The kernel waits for them, and for all that the stream has done.
    """

    def __init__(self) -> None:
        self._id = 0
        self._last: tuple[Node, ...] = ()

    def launch(self, stream: int, launch: Callable[[], object]) -> None:
        """Launch work on the current stream; that is all where nothing is captured, or the driver is older than
        12.3."""
        capture = capture_of(stream) if _has_calls() else None
        if capture is None:
            launch()
            return
        before = self._last if self._id == capture.id else ()
        _call(
            "cuStreamUpdateCaptureDependencies_v2",
            ctypes.c_void_p(stream),
            _array(before),
            None,
            ctypes.c_size_t(len(before)),
            ctypes.c_uint(_REPLACE),
        )
        launch()
        now = capture_of(stream)
        assert now is not None
        # What is no memset may read what the stream has written.
        earlier = [node for last in now.awaited for node in _all_before(last, before)]
        for node in {*now.awaited, *(node for node in earlier if not _is_memset(node))}:
            _let_wait(capture.graph, node, capture.awaited)
        self._id, self._last = capture.id, now.awaited


def awaited_by(node: Node) -> list[Node]:
    count = ctypes.c_size_t()
    _call("cuGraphNodeGetDependencies_v2", ctypes.c_void_p(node), None, None, ctypes.byref(count))
    if not count.value:
        return []
    nodes, edges = (ctypes.c_void_p * count.value)(), (ctypes.c_uint64 * count.value)()
    _call("cuGraphNodeGetDependencies_v2", ctypes.c_void_p(node), nodes, edges, ctypes.byref(count))
    return [node for node in nodes if node]


def _all_before(node: Node, end: Collection[Node]) -> list[Node]:
    nodes: list[Node] = []
    left = [node]
    while left:
        new = [node for node in awaited_by(left.pop()) if node not in end and node not in nodes]
        nodes += new
        left += new
    return nodes


def _is_memset(node: Node) -> bool:
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value == _MEMSET


def _let_wait(graph: int, node: Node, others: Sequence[Node]) -> None:
    new = [other for other in others if other not in awaited_by(node)]
    if new:
        _call(
            "cuGraphAddDependencies_v2",
            ctypes.c_void_p(graph),
            _array(new),
            _array([node] * len(new)),
            None,
            ctypes.c_size_t(len(new)),
        )


def _array(nodes: Sequence[Node]) -> Any:
    return (ctypes.c_void_p * max(len(nodes), 1))(*nodes)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _has_calls() -> bool:
    return all(hasattr(_driver(), name) for name in _CALLS)


def _call(name: str, *args: Any) -> None:
    if status := getattr(_driver(), name)(*args):
        raise Unsupported(f"cuda_graph: CUDA's driver refuses {name}: error {status}")
