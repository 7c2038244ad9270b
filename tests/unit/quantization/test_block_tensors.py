"""Linear layers in NVFP4 and MXFP8: what they compute, what a GPU is given, and what a low-rank branch adds."""

from typing import Any

import pytest
import torch

from tests.targets import CPU
from vivace.machinery.multi_gpu.transfer import pack_module, unpack_module
from vivace.machinery.quantization import SCHEMES
from vivace.machinery.quantization.block_tensors import from_mxfp8, from_nvfp4, to_mxfp8, to_nvfp4
from vivace.machinery.quantization.scheme import SchemeSettings


def layer_of(scheme: str, dtype: torch.dtype = torch.float32, name: str = "proj", **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.Linear(192, 80).to(dtype).requires_grad_(False)
    return SCHEMES["torchao", scheme].convert(layer, SchemeSettings(CPU, layer_name=name, **settings))


def inputs_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 25, 192, generator=torch.Generator().manual_seed(1)).to(dtype)


def rounded(scheme: str, numbers: torch.Tensor) -> torch.Tensor:
    if scheme == "mxfp8":
        return from_mxfp8(*to_mxfp8(numbers)).double()
    packed, scales, tensor_scale = to_nvfp4(numbers)
    return from_nvfp4(packed, scales).double() * tensor_scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_rounded_inputs_times_rounded_weights(scheme: str, dtype: torch.dtype) -> None:
    layer, inputs = layer_of(scheme, dtype), inputs_of(dtype)
    plain = torch.nn.Linear(192, 80)
    torch.manual_seed(0)
    plain.reset_parameters()
    weight = rounded(scheme, plain.weight.detach().to(dtype).float())
    expected = rounded(scheme, inputs.reshape(-1, 192).float()) @ weight.T + layer.bias.double()
    output = layer(inputs)
    assert (output.dtype, output.shape) == (dtype, (2, 25, 80))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(output.reshape(-1, 80).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(layer.weight.dequantize().double(), weight, rtol=tolerance, atol=tolerance)
    without_bias = layer_of(scheme, dtype)
    without_bias.bias = None
    torch.testing.assert_close(without_bias(inputs) + layer.bias, output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_a_gpu_multiplies_what_it_is_given(scheme: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own check of sizes and strides, which a GPU's matmul makes too, and the numbers that reach it."""
    layer = layer_of(scheme, torch.bfloat16, rank=rank)
    on_meta = layer.to("meta")
    output = on_meta(inputs_of(torch.bfloat16).to("meta"))
    assert (output.shape, output.dtype) == ((2, 25, 80), torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    with pytest.raises(TypeError):
        on_meta(inputs_of(torch.bfloat16).to("meta"))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_it_travels_and_is_traced(scheme: str) -> None:
    layer, inputs = layer_of(scheme, rank=16), inputs_of()
    expected = layer(inputs)
    pickled, storages = pack_module(layer, "cpu")
    sent, empty = unpack_module(pickled, "cpu")
    for storage, content in zip(empty, storages, strict=True):
        storage.copy_(content)
    assert torch.equal(sent(inputs), expected)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(inputs), expected)


def test_layers_of_one_row_keep_eight_bits() -> None:
    for name in ("time_embedding.linear_1", "blocks.0.norm1.linear", "layers.3.adaLN_modulation.0"):
        assert type(layer_of("nvfp4", name=name, rank=16).weight).__name__ == "MxFp8Tensor"
    assert type(layer_of("nvfp4", name="blocks.0.attn.to_q").weight).__name__ == "NvFp4Tensor"


def outlying(rows: int = 96, columns: int = 160) -> torch.Tensor:
    """A weight of a few strong directions, as trained ones have, in noise."""
    made = torch.Generator().manual_seed(3)
    strong = torch.randn(rows, 6, generator=made) @ torch.randn(6, columns, generator=made)
    return strong + 0.3 * torch.randn(rows, columns, generator=made)


def test_a_branch_takes_most_of_the_error_away() -> None:
    inputs = torch.randn(64, 160, generator=torch.Generator().manual_seed(4))
    errors = {}
    for rank in (0, 8):
        layer = torch.nn.Linear(160, 96, bias=False).requires_grad_(False)
        layer.weight = torch.nn.Parameter(outlying(), requires_grad=False)
        exact = layer(inputs)
        made = SCHEMES["torchao", "nvfp4"].convert(layer, SchemeSettings(CPU, rank=rank))
        errors[rank] = float((made(inputs) - exact).norm() / exact.norm())
    assert 0.05 < errors[0] < 0.25
    assert errors[8] < 0.35 * errors[0]
