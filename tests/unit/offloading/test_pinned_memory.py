"""Pinned memory in few blocks: tensors in it, what the gaps cost, and a host that has no more."""

import itertools
from collections import namedtuple
from typing import Any

import psutil
import pytest
import torch

from vivace.machinery.offloading import offloaded_module
from vivace.machinery.offloading.offloaded_module import PinnedMemory


@pytest.fixture
def _plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offloaded_module, "_allocate_pinned", lambda size: torch.empty(size, dtype=torch.uint8)
    )


@pytest.mark.usefixtures("_plain_memory")
def test_copies_lie_side_by_side_and_are_the_same_tensors() -> None:
    tensors = [
        torch.randn(5, 3),
        torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(7, 9).t(),
        torch.randn(6, 6)[::2, ::2],
        torch.randn(3, dtype=torch.float16),
        torch.arange(4).expand(2, 4),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.randn(33).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ]
    memory = PinnedMemory(sum(t.nbytes for t in tensors))
    copies = [memory.pin(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy.float(), tensor.float())
        assert copy.data_ptr() % 16 == 0
    assert copies[1].stride() == tensors[1].stride()
    assert copies[2].stride() == tensors[2].stride()
    spans = sorted((c.data_ptr(), c.data_ptr() + c.nbytes) for c in copies)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert memory.num_bytes == sum(t.nbytes for t in tensors)
    assert memory.refused is None
    assert memory.pin(torch.empty(0)) is None


def test_a_host_that_has_no_more_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> Any:
        sizes.append(size)
        if len(sizes) > 1:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(offloaded_module, "_allocate_pinned", allocate)
    memory = PinnedMemory(2**20)
    assert memory.pin(torch.empty(2**20 - 4096, dtype=torch.uint8)) is not None
    assert memory.pin(torch.empty(2**20)) is None
    assert memory.pin(torch.empty(2**20)) is None
    assert memory.pin(torch.empty(1024)) is not None, "in what it gave before"
    assert len(sizes) == 2
    assert memory.refused == "CUDA error: out of memory"


def test_the_last_of_the_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    had = namedtuple("had", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: had(32 * 10**9, 2 * 10**9 + 2**20))
    monkeypatch.setattr(torch, "empty", lambda size, **how: (size, how["pin_memory"]))
    assert offloaded_module._allocate_pinned(2**20) == (2**20, True)
    with pytest.raises(RuntimeError, match=r"2\.0 GB of the host's memory are free"):
        offloaded_module._allocate_pinned(2**20 + 1)
