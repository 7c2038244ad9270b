"""Swapping a module's tensors, with the CPU as the device: onloading copies, so addresses tell what is onloaded."""

from typing import Any

import pytest
import torch

from vivace.machinery.offloading import offloaded_module
from vivace.machinery.offloading.offloaded_module import OffloadedModule, PinnedMemory
from vivace.machinery.quantization.block_tensors import nvfp4_weight
from vivace.machinery.quantization.packed_int4 import pack


def addresses(module: Any) -> list[int]:
    """Of everything that holds data."""
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def test_onloading_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    part = OffloadedModule(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)), torch.device("cpu")
    )
    on_host = addresses(part.module)
    make = torch.empty_like

    def little_memory(like: torch.Tensor, **how: Any) -> torch.Tensor:
        if len(like) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(like, **how)

    monkeypatch.setattr(torch, "empty_like", little_memory)
    with pytest.raises(torch.OutOfMemoryError):
        part.onload()
    assert addresses(part.module) == on_host
    assert not part.is_onloaded


def test_replaced_buffers_are_restored() -> None:
    """`Module.to` replaces buffers, and only swaps the data of parameters."""
    module = torch.nn.BatchNorm1d(4)
    part = OffloadedModule(module, torch.device("cpu"))
    module.running_mean.fill_(1 / 3)
    mean, weight = module.running_mean, module.weight
    part.onload()
    assert module.weight is weight
    module.to(torch.float64)
    part.offload()
    assert module.running_mean is mean
    assert module.weight is weight
    assert {t.dtype for t in module.state_dict().values()} == {torch.float32, torch.int64}
    part.offload()
    assert module.running_mean is mean


def test_views_of_one_storage_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offloaded_module, "_allocate_pinned", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    first, second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    second.weight = torch.nn.Parameter(first.weight.data)  # other objects, the same data
    part = OffloadedModule(torch.nn.Sequential(first, second), torch.device("cpu"))
    values = first.weight.detach().clone()
    memory = PinnedMemory(1024)
    part.move_to_host(memory)
    assert memory.num_bytes == 256
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert part.onload() == 256
    assert first.weight.data_ptr() == second.weight.data_ptr()
    part.offload()
    assert torch.equal(first.weight, values)
    assert torch.equal(second.weight, values)


def test_packed_int4_is_onloaded() -> None:
    layer = torch.nn.Linear(64, 8, bias=False)
    layer.weight = torch.nn.Parameter(pack(layer.weight), requires_grad=False)
    part = OffloadedModule(torch.nn.Sequential(layer), torch.device("cpu"))
    part.move_to_host(None)
    on_host, inputs = layer.weight, torch.randn(3, 64)
    expected = layer(inputs)
    assert part.onload() == sum(getattr(on_host, name).nbytes for name in ("packed", "scale", "zero"))
    assert type(layer.weight) is type(on_host)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.packed.data_ptr() != on_host.packed.data_ptr()
    assert torch.equal(layer(inputs), expected)
    part.offload()
    assert layer.weight is on_host


def test_blocks_and_their_low_rank_branch_are_onloaded() -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    layer.weight = torch.nn.Parameter(nvfp4_weight(layer.weight, rank=4), requires_grad=False)
    part = OffloadedModule(torch.nn.Sequential(layer), torch.device("cpu"))
    part.move_to_host(None)
    on_host, inputs = layer.weight, torch.randn(3, 64)
    expected = layer(inputs)
    names = ("packed", "scale", "tensor_scale", "up", "down")
    assert part.onload() == sum(getattr(on_host, name).nbytes for name in names)
    assert all(getattr(layer.weight, n).data_ptr() != getattr(on_host, n).data_ptr() for n in names)
    assert torch.equal(layer(inputs), expected)
    part.offload()
    assert layer.weight is on_host


class _State:
    """As bitsandbytes keeps scales: in objects that are attributes of weights and layers."""

    __module__ = "bitsandbytes.functional"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class _Weight(torch.nn.Parameter):
    pass


def test_scales_in_attributes_of_a_weight_are_onloaded() -> None:
    class Layer(torch.nn.Module):
        __module__ = "bitsandbytes.nn"

        def __init__(self) -> None:
            super().__init__()
            inner = _State(absmax=torch.ones(2), code=torch.arange(3.0))
            self.weight = _Weight(torch.zeros(4), requires_grad=False)
            self.weight.quant_state = _State(absmax=torch.ones(5), blocksize=64, state2=inner)
            self.weight.SCB, self.weight.module = self.weight.data, self
            self.quant_state, self.state = self.weight.quant_state, _State(CB=None, SCB=None)

    layer = Layer()
    part = OffloadedModule(torch.nn.Sequential(layer), torch.device("cpu"))
    part.move_to_host(None)
    weight, outer = layer.weight, layer.quant_state
    before = (weight.data_ptr(), outer.absmax, outer.state2.absmax, outer.state2.code, weight.SCB)
    assert part.onload() == 4 * (4 + 5 + 2 + 3), "the weight is copied once"
    assert weight.SCB.data_ptr() == weight.data_ptr() != before[0]
    assert layer.quant_state is weight.quant_state is outer
    assert outer.absmax is not before[1]
    assert outer.state2.code is not before[3]
    layer.state.SCB, weight.SCB = weight.SCB, None  # type: ignore[attr-defined]  # as its first call does
    part.offload()
    assert layer.state.SCB is None, "no copy is held"  # type: ignore[attr-defined]
    assert weight.data_ptr() == before[0]
    after = (outer.absmax, outer.state2.absmax, outer.state2.code, weight.SCB)
    assert all(now is then for now, then in zip(after, before[1:], strict=True))
