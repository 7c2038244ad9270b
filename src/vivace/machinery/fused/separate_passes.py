"""A fused model's matmul where a GPU's cuBLASLt has none with what follows it: PyTorch's, and the rest in other passes.

NVIDIA documents which matmuls in e4m3 Hopper has. An Ada GPU may lack those with GELU, or with an output in e4m3; a
matmul with one scale a tensor and an output in bf16 it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vivace.machinery.fused.cublas_lt import Kind

_kinds: set[Kind] = set()


def note(kind: Kind) -> None:
    """Remember a kind of matmul that takes separate passes in this process."""
    _kinds.add(kind)


def evidence() -> dict[str, int]:
    """Return how many kinds of matmuls took separate passes, if any, for the record."""
    return {"matmuls_in_separate_passes": len(_kinds)} if _kinds else {}


def multiply(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool = False,
    onto: torch.Tensor | None = None,
) -> None:
    """Write what `cublas_lt.multiply` does, with the product rounded to bf16 in between."""
    import torch

    from vivace.machinery.kernels import reference

    if values.dtype == torch.bfloat16:
        product = torch.nn.functional.linear(values, weight)
    else:
        of_values, of_weight = (scale.reshape(1) for scale in scales[:2])
        product = torch._scaled_mm(
            values, weight.t(), of_values, of_weight, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    made = product.float() if bias is None else product.float() + bias.float()
    if gelu:
        made = reference.gelu(made)
    if onto is not None:
        made = made + onto.float()
    if out.dtype == torch.float8_e4m3fn:
        made = reference.to_e4m3(made * scales[2].reshape(1))
    out.copy_(made)
