"""What is chosen among cuBLASLt's algorithms, with a plan that needs no GPU."""

from typing import Any

import torch

from vivace.machinery.fused.cublas_lt import algorithms_like_the_first


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
