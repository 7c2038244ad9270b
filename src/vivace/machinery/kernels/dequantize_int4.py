"""A Triton kernel that dequantises packed int4 weights in one pass.

Dequantising is bound by memory: per two weights it reads one byte and writes four, in fp16 or bf16. PyTorch's
operators would write every intermediate (values, fp32, scaled fp32) to memory as well. The kernel reads each byte once,
unpacks, scales and shifts in registers, and writes both weights side by side. The arithmetic is in fp32 and rounded
once, as in `vivace.machinery.quantization.packed_int4.dequantize`. On a GPU a test holds it to half of a copy's speed
at least.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BYTES = 2048
"""Packed bytes per program: fewer leave too few loads in flight to cover the latency of memory."""


# Without annotations: Triton reads them as code.
@triton.jit
def _dequantize(
    packed,
    scale,
    zero,
    weights,
    num_bytes,
    GROUP_BYTES: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < num_bytes
    both = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    # Rows hold whole groups, so groups can be counted across rows.
    group = at // GROUP_BYTES
    step = tl.load(scale + group, mask=inside, other=0).to(tl.float32)
    middle = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    low = ((both & 15) - 8).to(tl.float32) * step + middle
    high = ((both >> 4) - 8).to(tl.float32) * step + middle
    pair = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(weights + pair, tl.interleave(low, high).to(weights.dtype.element_ty), mask=pair < 2 * num_bytes)


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights as `packed_int4.dequantize` does; all tensors contiguous, on one GPU."""
    rows, half = packed.shape
    weights = torch.empty((rows, 2 * half), dtype=dtype, device=packed.device)
    num_bytes = packed.numel()
    grid = (triton.cdiv(num_bytes, _BYTES),)
    _dequantize[grid](packed, scale, zero, weights, num_bytes, half // scale.shape[1], _BYTES)
    return weights
