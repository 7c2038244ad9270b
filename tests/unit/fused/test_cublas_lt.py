"""What is chosen among cuBLASLt's algorithms, with a plan that needs no GPU."""

from typing import Any

import pytest
import torch

from vivace.errors import Unsupported
from vivace.machinery.fused import cublas_lt
from vivace.machinery.fused.cublas_lt import algorithms_like_the_first
from vivace.machinery.fused.products import multiply, multiply_with_gelu


class Plan:
    """Its third algorithm adds up to something that no rounding makes equal."""

    algorithms = (0, 1, 2, 3)

    def __call__(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        scales: Any,
        bias: Any,
        onto: Any,
        out: Any,
        index: int = 0,
    ) -> None:
        half = len(weight[0]) // 2
        whole = values @ weight.t()
        split = values[:, :half] @ weight[:, :half].t() + values[:, half:] @ weight[:, half:].t()
        out.copy_(split * 1.2 if index == 2 else whole)


def test_an_algorithm_that_rounds_otherwise_is_left_out() -> None:
    values, weight = torch.randn(3, 8), torch.randn(5, 8)
    wide = torch.empty(3, 9, dtype=torch.bfloat16)
    for out in (wide[:, :5], torch.empty(3, 5, dtype=torch.float8_e4m3fn)):
        assert algorithms_like_the_first(Plan(), (values, weight, (), None, None, out)) == [0, 1, 3]


BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CASES = [
    *((factors, BF16, epilogue) for factors in (BF16, E4M3) for epilogue in ("none", "bias", "onto", "gelu")),
    (E4M3, E4M3, "none"),
    (E4M3, E4M3, "gelu"),
]
"""Matmuls that fused models have: the dtypes of the factors and of the output, and what follows."""


@pytest.mark.parametrize(("factors", "output", "epilogue"), CASES)
def test_what_cublas_lt_lacks_is_computed_in_separate_passes(
    factors: torch.dtype, output: torch.dtype, epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose cuBLASLt has no such matmul; a CPU has PyTorch's."""

    def refuses(*_: Any) -> None:
        raise Unsupported("cuBLASLt has no algorithm for this matmul")

    monkeypatch.setattr(cublas_lt, "_library", lambda: None)
    monkeypatch.setattr(cublas_lt, "Plan", refuses)
    monkeypatch.setattr(cublas_lt, "_in_passes", set())
    cublas_lt._plan.cache_clear()
    made = torch.Generator().manual_seed(0)
    values = (torch.randn(17, 128, generator=made) * 3).to(factors)[:, :64]
    weight = torch.randn(48, 64, generator=made).to(factors)
    bias = torch.randn(48, generator=made).bfloat16() if epilogue in ("bias", "gelu") else None
    onto = torch.randn(17, 48, generator=made).bfloat16() if epilogue == "onto" else None
    scales = (torch.tensor([0.5]), torch.tensor([0.25])) if factors == E4M3 else ()
    inverse = torch.tensor([8.0])
    all_scales = (*scales, inverse) if output == E4M3 else scales
    out, expected = torch.empty(17, 48, dtype=output), torch.empty(17, 48, dtype=output)
    cublas_lt.multiply(values, weight, all_scales, bias, out, gelu=epilogue == "gelu", onto=onto)
    if bias is not None and epilogue == "gelu":
        of_out = (1 / inverse, inverse) if output == E4M3 else None
        multiply_with_gelu(values, weight, scales, bias, expected, of_out)
    else:
        multiply(values, weight, all_scales, bias, expected, onto)
    rtol = 0.13 if output == E4M3 else 0.01  # the next number of the format
    torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=0.02)
    assert cublas_lt.evidence() == {"matmuls_in_separate_passes": 1}
    cublas_lt._plan.cache_clear()
