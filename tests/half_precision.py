"""Convolutions in 16 bits at the speed of fp32 where the CPU has no instructions for them.

There PyTorch takes a kernel without blocking or vectors, 30 times as slow as fp32: 11.5 of the 12 s that a small FLUX
takes in bf16 are the VAE's convolutions. Here they add up in fp32 and round the result, as hardware does. So do
products of fp8 with a scale for each tensor, row or column, which take 100 times as long there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor


def quick_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace them until the end of a test, in this process; other processes have PyTorch's own.

    A test that compares with one bit by bit has the marker `own_convolutions`.
    """
    slow = _slow_dtypes()
    plain: Any = torch.nn.Conv2d._conv_forward
    plain_mm: Any = torch._scaled_mm

    def forward(self: torch.nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type != "cpu" or x.dtype not in slow or weight.dtype is not x.dtype:
            return plain(self, x, weight, bias)
        output: Tensor = plain(self, x.float(), weight.float(), None if bias is None else bias.float())
        return output.to(x.dtype)

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *more: Any, **options: Any) -> Any:
        bias, dtype = options.get("bias"), options.get("out_dtype")
        is_plain = (
            a.device.type == "cpu"
            and scale_a.dtype == scale_b.dtype == torch.float32
            and scale_a.numel() in (1, a.shape[0])
            and scale_b.numel() in (1, b.shape[1])
        )
        if not is_plain or more or dtype is None or options.get("scale_result") is not None:
            return plain_mm(a, b, scale_a, scale_b, *more, **options)
        output = a.float() @ b.float() * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
        return (output if bias is None else output + bias.float()).to(dtype)

    if slow:
        monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", forward)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def _slow_dtypes() -> set[torch.dtype]:
    """Return those that oneDNN cannot compute in on this CPU; none where PyTorch was built without it."""
    if not torch.backends.mkldnn.is_available():
        return set()
    ops = torch.ops.mkldnn
    supported = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return {dtype for dtype, is_supported in supported.items() if not is_supported}
