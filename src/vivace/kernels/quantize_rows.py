"""Quantisation of rows to e4m3, each with a scale of its own, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_rows(x, out, scale, x_stride, channels, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < channels
    value = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
    value = tl.minimum(tl.maximum(value * (448.0 / largest), -448.0), 448.0)
    tl.store(scale + row, largest / 448.0)
    tl.store(out + row.to(tl.int64) * channels + at, value.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Write what `vivace.kernels.reference.quantize_rows` returns to `out` and `scale`."""
    rows, channels = x.shape
    _quantize_rows[(rows,)](
        x, out, scale, x.stride(0), channels, BLOCK=triton.next_power_of_2(channels), num_warps=4
    )
