"""Four-bit weights packed two to a byte: rounding, and what a layer computes. The kernel itself needs a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vivace.machinery.quantization import packed_int4
from vivace.machinery.quantization.packed_int4 import dequantize, group_size, pack, takes_kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("inputs", "group"), [(3072, 128), (320, 64), (96, 32), (100, 0)])
def test_the_largest_group_that_divides(inputs: int, group: int) -> None:
    assert group_size(inputs) == group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 32), (33, 96), (7, 640)])
def test_no_weight_is_off_by_more_than_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    made = pack(weight)
    assert (made.packed.dtype, made.packed.numel()) == (torch.uint8, weight.numel() // 2)
    assert made.scale.numel() == made.zero.numel() == weight.numel() // group_size(shape[1])
    assert (made.shape, made.dtype) == (weight.shape, dtype)
    groups = weight.float().reshape(shape[0], -1, group_size(shape[1]))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (made.dequantize().float().reshape(groups.shape) - groups).abs()
    rounding = 16 * torch.finfo(dtype).eps  # of the scale, the zero and the result
    assert bool((error <= 0.5 * step[..., None] + rounding).all())
    assert float(error.max()) > 0.3 * float(step.max()), "sixteen values are no more than sixteen"


def test_a_group_of_equal_weights() -> None:
    for value in (0.0, 0.75):
        torch.testing.assert_close(pack(torch.full((2, 32), value)).dequantize(), torch.full((2, 32), value))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_multiplies_by_the_dequantised_weights(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48).to(torch.bfloat16).requires_grad_(False)
    layer.weight = torch.nn.Parameter(pack(layer.weight), requires_grad=False)
    inputs = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(inputs, layer.weight.dequantize(), layer.bias)
    called = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    assert torch.equal(called(inputs), expected)


def test_the_kernel_is_not_called_while_a_compiler_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo asks the layer for the shape of its result with tensors of a GPU that hold no values."""
    monkeypatch.setattr(packed_int4, "_has_triton", lambda: True)
    made = torch.empty(48, 32, dtype=torch.uint8, device="meta")
    with FakeTensorMode() as mode:
        seen = FakeTensor(mode, made, torch.device("cuda", 0))
    assert seen.is_cuda
    assert not takes_kernel(seen)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_in_tritons_interpreter(dtype: torch.dtype) -> None:
    program = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vivace.machinery.quantization import packed_int4
from vivace.machinery.quantization.packed_int4 import dequantize, pack
from vivace.machinery.kernels import dequantize_int4
for shape in ((48, 32), (33, 96), (257, 3072)):
    packed = pack(torch.randn(shape).to({dtype}))
    parts = packed.packed, packed.scale, packed.zero, {dtype}
    made = dequantize_int4.dequantize(*parts)
    torch.testing.assert_close(made, dequantize(*parts), rtol=0.01, atol=0.01)  # the interpreter truncates bf16
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_on_the_meta_device_it_has_the_right_shape() -> None:
    made = pack(torch.empty(64, 128, dtype=torch.bfloat16, device="meta"))
    assert dequantize(made.packed, made.scale, made.zero, torch.bfloat16).shape == (64, 128)
