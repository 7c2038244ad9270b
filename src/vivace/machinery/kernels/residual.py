"""The sum of a residual, a branch and the branch's bias, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


# The number of rows is not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["rows"])
def _add(
    x,
    y,
    bias,
    out,
    rows,
    channels,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    inside = (row < rows)[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_biased(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write x + y + bias to `out`: all (rows, channels) and contiguous, but bias, (channels,)."""
    rows, channels = x.shape
    block = min(triton.next_power_of_2(channels), 512)
    together = max(_ELEMENTS // block, 1)
    _add[(triton.cdiv(rows, together), triton.cdiv(channels, block))](
        x, y, bias, out, rows, channels, ROWS=together, BLOCK=block, num_warps=4
    )
