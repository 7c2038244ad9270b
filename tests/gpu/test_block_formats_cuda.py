"""NVFP4 and MXFP8 on a GPU: rounded as on a CPU, and multiplied by tensor cores where there are such."""

from __future__ import annotations

import pytest
import torch

from vivace.machinery.quantization import SCHEMES
from vivace.machinery.quantization.block_tensors import to_mxfp8, to_nvfp4
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.measure.machine import this_machine

pytestmark = pytest.mark.gpu


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outliers", [False, True])
def test_a_gpu_rounds_as_a_cpu_to_the_last_bit(dtype: torch.dtype, outliers: bool) -> None:
    rows = torch.randn(300, 3072, generator=torch.Generator().manual_seed(0)).to(dtype)
    if outliers:
        rows[:, 17] *= 1000
    for quantize in (to_nvfp4, to_mxfp8):
        for here, there in zip(quantize(rows), quantize(rows.cuda()), strict=True):
            assert torch.equal(bits(here), bits(there))


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_tensor_cores_compute_what_a_cpu_does(scheme: str, rank: int) -> None:
    settings = SchemeSettings(this_machine("cuda"), rank=rank, layer_name="proj")
    entry = SCHEMES["torchao", scheme]
    if (reason := entry.unsupported(settings)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    layer = entry.convert(torch.nn.Linear(3072, 1536).bfloat16().requires_grad_(False), settings)
    for num_rows in (1, 77, 512):
        inputs = torch.randn(num_rows, 3072).bfloat16()
        expected = layer(inputs)
        layer.cuda()
        made = layer(inputs.cuda()).cpu()
        layer.cpu()
        assert (made - expected).float().norm() < 0.01 * expected.float().norm()
