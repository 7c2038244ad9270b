# ruff: noqa: N802 (the names are those of CUDA)
"""What captured launches wait for, with a driver that keeps a graph's nodes and edges in Python."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vivace.machinery.compilation import stream_capture
from vivace.machinery.compilation.stream_capture import MemsetsBeside, awaited_by, capture_of

STREAM = 7
KERNEL, MEMSET = 0, 2


class Driver:
    """One stream's capture. Addresses of nodes are 1000, 1001, ..."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.edges: set[tuple[int, int]] = set()
        self.awaited: list[int] = []
        self.status = 1
        self.id = 5
        self._held: Any = None

    def add(self, kind: int) -> int:
        node = 1000 + len(self.kinds)
        self.kinds.append(kind)
        self.edges |= {(before, node) for before in self.awaited}
        self.awaited = [node]
        return node

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *results: Any) -> int:
        assert stream.value == STREAM
        status, number, graph, nodes, _, count = (each._obj for each in results)
        self._held = (ctypes.c_void_p * max(len(self.awaited), 1))(*self.awaited)
        status.value, number.value, graph.value = self.status, self.id, 99
        nodes.value, count.value = ctypes.addressof(self._held), len(self.awaited)
        return 0

    def cuStreamUpdateCaptureDependencies_v2(
        self, _: Any, nodes: Any, __: Any, count: Any, flags: Any
    ) -> int:
        assert flags.value == 1, "they replace those that there were"
        self.awaited = list(nodes[: count.value])
        return 0

    def cuGraphNodeGetDependencies_v2(self, node: Any, nodes: Any, _: Any, count: Any) -> int:
        dependencies = [before for before, after in sorted(self.edges) if after == node.value]
        for index, before in enumerate(dependencies if nodes is not None else ()):
            nodes[index] = before
        count._obj.value = len(dependencies)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value - 1000]
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, ends: Any, nodes: Any, _: Any, count: Any) -> int:
        assert graph.value == 99
        new = set(zip(ends[: count.value], nodes[: count.value], strict=True))
        if new & self.edges:
            return 1  # the driver takes no edge twice
        self.edges |= new
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(stream_capture, "_driver", lambda: made)
    stream_capture._has_calls.cache_clear()
    yield made
    stream_capture._has_calls.cache_clear()


def attention(driver: Driver) -> Callable[[], None]:
    def launch() -> None:
        for kind in (MEMSET, MEMSET, MEMSET, KERNEL):
            driver.add(kind)

    return launch


def test_memsets_wait_for_the_launch_before_and_the_kernel_for_all(driver: Driver) -> None:
    beside = MemsetsBeside()
    first = driver.add(KERNEL)
    beside.launch(STREAM, attention(driver))
    (kernel,) = driver.awaited
    assert set(awaited_by(kernel)) == {first, kernel - 1}
    assert awaited_by(kernel - 3) == [], "the first memset"
    between = driver.add(KERNEL)
    assert awaited_by(between) == [kernel]
    beside.launch(STREAM, attention(driver))
    (second,) = driver.awaited
    assert set(awaited_by(second)) == {between, second - 1}
    assert awaited_by(second - 3) == [kernel]


def test_another_capture_knows_nothing_of_the_one_before(driver: Driver) -> None:
    beside = MemsetsBeside()
    driver.add(KERNEL)
    beside.launch(STREAM, attention(driver))
    driver.id, driver.awaited = 6, []
    first = driver.add(KERNEL)
    beside.launch(STREAM, attention(driver))
    (kernel,) = driver.awaited
    assert set(awaited_by(kernel)) == {first, kernel - 1}
    assert awaited_by(kernel - 3) == []


def test_a_kernel_before_the_last_one_waits_too(driver: Driver) -> None:
    def launch() -> None:
        for kind in (MEMSET, KERNEL, KERNEL):
            driver.add(kind)

    first, other = driver.add(KERNEL), driver.add(KERNEL)
    driver.awaited = [first, other]
    MemsetsBeside().launch(STREAM, launch)
    (last,) = driver.awaited
    assert set(awaited_by(last)) == {first, other, last - 1}
    assert set(awaited_by(last - 1)) == {first, other, last - 2}
    assert awaited_by(last - 2) == []


def test_without_memsets_all_is_as_if_it_were_only_launched(driver: Driver) -> None:
    beside = MemsetsBeside()
    driver.add(KERNEL)
    for _ in range(2):  # the second waits for the first already
        (before,) = driver.awaited
        beside.launch(STREAM, lambda: driver.add(KERNEL))
        (kernel,) = driver.awaited
        assert awaited_by(kernel) == [before]


def test_outside_of_a_capture_and_with_an_old_driver_it_only_launches(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.status = 0
    assert capture_of(STREAM) is None
    before = driver.add(KERNEL)
    MemsetsBeside().launch(STREAM, attention(driver))
    assert awaited_by(before + 1) == [before]
    driver.status = 1
    monkeypatch.delattr(Driver, "cuGraphAddDependencies_v2")
    stream_capture._has_calls.cache_clear()
    (before,) = driver.awaited
    MemsetsBeside().launch(STREAM, attention(driver))
    assert awaited_by(before + 1) == [before]
