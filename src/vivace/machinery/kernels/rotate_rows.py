"""A Triton kernel that rotates rows and quantises them to int8, in one launch.

Reads each row twice, the second time from a cache: nothing of it is kept, so that wide rows fit the registers and the
shared memory of old GPUs. The arithmetic is that of `vivace.machinery.kernels.reference.rotate`, in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import TINY

_CHUNK = 2048
_TO_WHOLE = tl.constexpr(12_582_912.0)
"""1.5 * 2**23: what is added to it and taken away again is rounded to the nearest whole number, the even of two."""


@triton.jit
def _rotated(x, start, CHANNELS: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr):
    """A part of a row, rotated, but each block of it backwards."""
    at = start + tl.arange(0, CHUNK)
    value = tl.load(x + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        fours = tl.reshape(value, (CHUNK >> (2 * stage + 2), 4, 1 << (2 * stage)))
        fours = tl.sum(fours, axis=1, keep_dims=True) * 0.5 - fours
        value = tl.reshape(fours, (CHUNK,))
    return value


@triton.jit
def _rotate_rows(
    x,
    out,
    scales,
    tiny,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x += row * CHANNELS
    out += row * CHANNELS
    largest = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, CHANNELS, CHUNK):
        largest = tl.maximum(largest, tl.abs(_rotated(x, start, CHANNELS, STAGES, CHUNK)))
    scale = tl.maximum(tl.max(largest, axis=0), tiny) / 127.0
    tl.store(scales + row, scale)
    for start in range(0, CHANNELS, CHUNK):
        value = _rotated(x, start, CHANNELS, STAGES, CHUNK) / scale
        whole = (value + _TO_WHOLE) - _TO_WHOLE
        at = start + tl.arange(0, CHUNK)
        to = (at | (SIZE - 1)) - (at & (SIZE - 1))
        tl.store(out + to, whole.to(tl.int8), mask=at < CHANNELS)


def rotate_rows(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous rows (rows, channels), rotated in blocks of `size`, as int8, and their scales (rows, 1)."""
    rows, channels = x.shape
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _rotate_rows[(rows,)](
        x,
        out,
        scales,
        TINY,
        CHANNELS=channels,
        SIZE=size,
        STAGES=(size.bit_length() - 1) // 2,
        CHUNK=min(_CHUNK, triton.next_power_of_2(channels)),
        num_warps=4,
    )
    return out, scales
