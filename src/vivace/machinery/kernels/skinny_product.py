"""A matmul of a few rows with a very tall weight, which may be skipped by a flag on the device.

FLUX's modulations: 3.25 billion weights for one row a step. The product is bound by reading the weight once, in bf16 or
e4m3; the rows are multiplied in bf16. Whether it is needed is known on the device alone, so the kernel asks there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 64


@triton.jit
def _skinny_product(
    x,
    weight,
    scale,
    bias,
    out,
    skip,
    num_rows,
    num_outputs,
    out_stride,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
) -> None:
    if HAS_SKIP:  # noqa: SIM102
        if tl.load(skip) != 0:
            return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    has_output = output < num_outputs
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        has_channel = channel < CHANNELS
        some = tl.load(
            x + row[:, None] * CHANNELS + channel[None, :],
            mask=(row < num_rows)[:, None] & has_channel[None, :],
            other=0.0,
        )
        weights = tl.load(
            weight + output[None, :].to(tl.int64) * CHANNELS + channel[:, None],
            mask=has_output[None, :] & has_channel[:, None],
            other=0.0,
        )
        total += tl.dot(some, weights.to(some.dtype))
    if HAS_SCALE:
        total *= tl.load(scale + output, mask=has_output, other=0.0)[None, :]
    total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None].to(tl.int64) * out_stride + output[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < num_rows)[:, None] & has_output[None, :],
    )


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor,
    out: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """Write x @ (weight * scale).T + bias to `out`, unless the flag `skip` is set.

    Args:
        x: (rows, channels), bf16, contiguous, at most MAX_ROWS rows; fp32 under the interpreter.
        weight: (outputs, channels), bf16 or e4m3.
        scale: (outputs,), fp32, of an e4m3 weight.
        skip: (1,), int32: nothing is written if it is not 0.
    """
    rows, channels = x.shape
    outputs = weight.shape[0]
    assert rows <= MAX_ROWS
    _skinny_product[(triton.cdiv(outputs, 64),)](
        x,
        weight,
        scale if scale is not None else bias,
        bias,
        out,
        skip if skip is not None else bias,
        rows,
        outputs,
        out.stride(0),
        CHANNELS=channels,
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=64,
        BLOCK=128,
        HAS_SCALE=scale is not None,
        HAS_SKIP=skip is not None,
        num_warps=4,
        num_stages=4,
    )
