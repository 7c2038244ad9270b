"""GELU and quantisation of hidden channels, in one pass.

The scale is known before: GELU never exceeds its input, and that is bounded by the norms of the token and of the
weights (`vivace.kernels.reference.product_bounds`). So no largest value is reduced, and a token of 12,288 channels
needs not be kept in one program. The tanh form is x * sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3): one
exponential instead of a tanh.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.kernels.reference import Tokens

_BLOCK_FP8, _BLOCK_BF16, _WARPS = 4096, 2048, 4
"""The fastest on an H200, by little."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gelu(  # type: ignore[no-untyped-def]
    x,
    bias,
    out,
    scale,
    bound,
    x_stride,
    out_stride,
    bias_stride,
    num_text_rows,
    channels,
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    QUANTIZE: tl.constexpr,  # noqa: N803
    HAS_BOUND: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    stream = (row >= num_text_rows).to(tl.int32)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    value = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + stream * bias_stride + at, mask=inside, other=0.0).to(tl.float32)
    # 2 sqrt(2 / pi) log2(e), since exp2 is what the chip has.
    twice_u = value * (1.0 + 0.044715 * value * value) * 2.302208198
    value = value / (1.0 + tl.exp2(-twice_u))
    if QUANTIZE:
        if HAS_BOUND:
            step = tl.maximum(tl.load(bound), 1e-12) / 448.0
            if tl.program_id(1) == 0:
                tl.store(scale + row, step)
        else:
            step = tl.load(scale + row)
        value = value * (1.0 / step)  # the cast saturates
    tl.store(out + row.to(tl.int64) * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def gelu(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: Tokens,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    bound: torch.Tensor | None = None,
) -> None:
    """Write GELU(x + bias) to `out`, which may be x itself.

    Args:
        x, out: (rows, channels), whose rows may be part of wider ones; `out` is e4m3 if `scale` is given.
        bias: (1 or 2, channels): of all rows, or of the text's and the image's.
        scale: (rows, 1), fp32, by which rows are divided; written if `bound` is given.
        bound: (1,), fp32, which no element exceeds.
    """
    rows, channels = x.shape
    block = min(_BLOCK_BF16 if scale is None else _BLOCK_FP8, triton.next_power_of_2(channels))
    _gelu[(rows, triton.cdiv(channels, block))](
        x,
        bias if bias is not None else x,
        out,
        scale if scale is not None else x,
        bound if bound is not None else x,
        x.stride(0),
        out.stride(0),
        bias.stride(0) if bias is not None and bias.shape[0] > 1 else 0,
        tokens.num_text_rows,
        channels,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        QUANTIZE=scale is not None,
        HAS_BOUND=bound is not None,
        num_warps=_WARPS,
    )
