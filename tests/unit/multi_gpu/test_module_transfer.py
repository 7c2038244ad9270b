"""A module arrives with its structure, its weights separately, whatever their dtype."""

from typing import Any

import pytest
import torch
from torch import nn

from vivace.machinery.multi_gpu.transfer import pack_module, unpack_module


def sent(module: nn.Module) -> tuple[Any, int]:
    """The module as a peer receives it, and the number of its storages."""
    pickled, weights = pack_module(module, "cpu")
    received, empty = unpack_module(pickled, "cpu")
    assert [tensor.numel() for tensor in empty] == [tensor.numel() for tensor in weights]
    for to, content in zip(empty, weights, strict=True):
        to.copy_(content)
    return received, len(weights)


class Weights(nn.Module):
    """A weight of a dtype, and a view of it, which shares its memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(12.0).view(3, 4).to(dtype))
        self.register_buffer("first", self.weight[:1])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_each_dtype_arrives(dtype: torch.dtype) -> None:
    module = Weights(dtype)
    received, num_storages = sent(module)
    assert num_storages == 1
    assert received.weight.dtype == dtype
    assert received.weight.float().tolist() == module.weight.float().tolist()
    assert received.first.untyped_storage().data_ptr() == received.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_quantised_weights_arrive(kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    module = nn.Sequential(nn.Linear(32, 16))
    quantization.quantize_(module, getattr(quantization, kind)())
    received, _ = sent(module)
    assert type(received[0].weight) is type(module[0].weight)
    inputs = torch.randn(2, 32)
    assert torch.equal(received(inputs), module(inputs))
