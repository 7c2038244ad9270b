"""Sort operators and kernels into families: GEMM, convolution, attention, norm, elementwise, copy, communication."""

from __future__ import annotations

import re
from functools import cache

FAMILIES = (
    "GEMM",
    "convolution",
    "attention",
    "norm",
    "elementwise",
    "copy",
    "communication",
    "Python",
    "CUDA calls",
    "other",
)
PYTHON, CUDA_CALLS, OTHER = FAMILIES[-3:]

# The first match decides. Softmax occurs only in attention here.
_PATTERNS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("communication", r"nccl|c10d::|all_?gather|all_?reduce|all_?to_?all|broadcast_coalesced|symm_mem"),
        ("attention", r"attention|attn|flash|fmha|sdpa|softmax"),
        ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col"),
        ("norm", r"(layer|group|batch|rms|instance)_?norm|_norm_|norm_kernel|RowwiseMoments|welford"),
        (
            "GEMM",
            r"gemm|gemv|cublas|cutlass|nvjet|splitk|wgmma|(?:^|::|_)(?:addmm|bmm|mm|matmul|linear|baddbmm|einsum)\b"
            r"|scaled_mm|int_mm|triton_\w*(?:mm|matmul)\b|s\d{4,5}(?:gemm|tensorop)",
        ),
        (
            "copy",
            r"memcpy|memset|::(?:copy_|_to_copy|to|clone|contiguous|cat|stack|pad|empty\w*|zeros?\w*|fill_|full"
            r"|index\w*|gather|_local_scalar_dense|item|constant_pad_nd|repeat\w*|roll|select_scatter|arange"
            r"|upsample\w*|nonzero|masked_\w+|embedding)\b|CatArray|copy_kernel|upsample|FillFunctor|index\w*_kernel"
            r"|embedding",
        ),
        ("elementwise", r"elementwise|triton_poi|pointwise"),
        (
            "elementwise",
            r"::(?:add|sub|rsub|mul|div|silu|gelu|relu|sigmoid|tanh|exp|log|sqrt|rsqrt|pow|neg|sin|cos|clamp\w*|round"
            r"|where|abs|lerp|addcmul|addcdiv|reciprocal|maximum|minimum|eq|ne|lt|le|gt|ge|bitwise_\w+|logical_\w+"
            r"|mean|sum|amax|amin|cumprod|cumsum|std|var|normal|randn|any|all|floor\w*|ceil|square)_?\b",
        ),
    )
)
_VIEWS = re.compile(
    r"::(?:view|_unsafe_view|reshape|_reshape_alias|permute|transpose|t|expand|as_strided|slice|select|squeeze"
    r"|unsqueeze|chunk|split\w*|unbind|detach\w*|lift_fresh|alias|flatten|unflatten|narrow|resolve_\w+|movedim)_?$"
)


@cache
def family_of(name: str) -> str | None:
    """Return the family of an operator's or kernel's name; None if the name does not tell."""
    if _VIEWS.search(name):
        return None
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), None)


def family_of_kernel(name: str, family: str | None) -> str:
    """Return the family of a kernel, copy or memset on a GPU.

    Args:
        family: by the operators that launched it; None if they do not tell, or if none did, as in a CUDA graph. Copies
            and collectives tell what they are; of other kernels the operators know more than the name.
    """
    own = family_of(name)
    if own == "communication" or name.startswith(("Memcpy", "Memset")):
        return own or "copy"
    return family or own or OTHER
