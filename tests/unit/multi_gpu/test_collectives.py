"""Messages that are fetched arrive whole, however long anybody takes; with threads that stand for processes."""

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from vivace.multi_gpu.collectives import Copies
from vivace.multi_gpu.symmetric_memory import NumberedAnew, OfProcesses, _Group, _OfProcesses


def dawdle() -> None:
    time.sleep(random.random() * 0.003)


class Buffer(_OfProcesses):
    def __init__(self, memories: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(memories)
        self._barrier = barrier

    def meet(self) -> None:
        self._barrier.wait()
        dawdle()  # before anything is fetched


class OfThreads(OfProcesses):
    """Memory that threads share. Each allocates the same buffers in the same order."""

    def __init__(
        self, rank: int, num: int, barrier: threading.Barrier, made: list[list[torch.Tensor]]
    ) -> None:
        super().__init__(rank, num)
        self.num_allocated = 0
        self._barrier, self._made = barrier, made

    def allocate(self, num_bytes: int) -> Buffer:
        if self.rank == 0:
            self._made.append([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.num)])
        self._barrier.wait()
        self.num_allocated += 1
        return Buffer(self._made[self.num_allocated - 1], self._barrier)


class Hurried(Copies):
    """Never takes turns."""

    def _next(self, num_bytes: int) -> Any:
        super()._next(num_bytes)
        return self._pairs[min(size for size in self._pairs if size >= num_bytes)][0]


def sent_by(rank: int, number: int, gathers: bool) -> torch.Tensor:
    """A message's tensor, of a size of its own; flat where it is exchanged."""
    rows = 12 * (1 + number % 3)
    shape = (rows, 3) if gathers else (rows,)
    return torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * rank + 100_000 * number


def run(kind: type[Copies], num: int, forwards: int = 8, messages: int = 7) -> list[str]:
    """What arrived wrong, in threads that dawdle at random."""
    barrier = threading.Barrier(num, timeout=30)
    made: list[list[torch.Tensor]] = []
    wrong: list[str] = []

    def work(rank: int) -> None:
        copies = kind(OfThreads(rank, num, barrier, made))
        for forward in range(forwards):
            copies.restart()
            for number in range(messages):
                gathers = bool((number + forward) % 2)
                dawdle()
                found = copies.start(sent_by(rank, number, gathers), gathers)
                copies.wait()
                everybody = [sent_by(peer, number, gathers) for peer in range(num)]
                parts = everybody if gathers else [each.chunk(num)[rank] for each in everybody]
                if not torch.equal(found, torch.cat(parts)):
                    wrong.append(f"forward {forward}, message {number} on {rank}")
            barrier.wait()  # the whole result is put together

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6, "two buffers of each size that was larger than those before"
    return wrong


@pytest.mark.parametrize("num", [2, 3, 4])
def test_what_arrives_is_what_everybody_sent(num: int) -> None:
    assert run(Copies, num) == []


def test_it_takes_two_buffers() -> None:
    """That the test above can fail: with one, somebody fetches what is written already for the next message."""
    assert run(Hurried, 3)


def test_tensors_that_are_not_contiguous() -> None:
    barrier = threading.Barrier(1)
    copies = Copies(OfThreads(0, 1, barrier, []))
    sent = torch.arange(12).view(3, 4).t()
    assert torch.equal(copies.start(sent, gathers=True), sent)


def test_a_process_that_shared_a_model_before_meets_those_that_were_just_started() -> None:
    """As symmetric memory writes and reads, which goes through C++; it counts from the start of a process."""
    common = dist.HashStore()
    processes = [(NumberedAnew(common), 7), (NumberedAnew(common), 0)]
    for number in range(3):
        stores = [
            dist.PrefixStore(f"CUDASymmetricMemory/{counted + number}", store) for store, counted in processes
        ]
        for rank, store in enumerate(stores):
            store.set(str(rank), bytes([rank, 255, number]))
        for store in stores:
            store.wait(["0", "1"])
            assert store.check(["0", "1"])
            assert store.get("1") == bytes([1, 255, number])
            assert store.multi_get(["0", "1"]) == [bytes([rank, 255, number]) for rank in range(2)]


def test_exchanges_keep_their_order() -> None:
    common = dist.HashStore()
    long_lived, fresh = NumberedAnew(common), NumberedAnew(common)
    for number in range(4):
        long_lived.set(f"CUDASymmetricMemory/{number + 12}/0", f"{number}")
    assert [fresh.get(f"CUDASymmetricMemory/{number}/0") for number in range(4)] == [b"0", b"1", b"2", b"3"]
    assert long_lived.add("barrier/3", 1) == 1
    assert fresh.add("barrier/0", 1) == 2, "numbers of another kind have a beginning of their own"


def test_each_session_has_a_group_of_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, other = _Group(0, 1), _Group(0, 1)
        assert one.name != other.name
        assert c10d._resolve_process_group(other.name).size() == 1
        other.close()
        with pytest.raises(RuntimeError):
            c10d._resolve_process_group(other.name)
        assert c10d._resolve_process_group(one.name).rank() == 0
        one.close()
    finally:
        dist.destroy_process_group()
