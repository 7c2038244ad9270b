"""cuBLASLt's fp8 matmuls with GELU and rounding inside, on a GPU."""

from __future__ import annotations

import pytest
import torch

from vivace.machinery.fused import cublas_lt
from vivace.machinery.fused.cublas_lt import Epilogue, Kind, Plan, multiply

pytestmark = pytest.mark.gpu


def _eight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * 60).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", [1, 77, 512, 4096])
@pytest.mark.parametrize("wide", [False, True])
def test_gelu_and_rounding_are_part_of_the_product(rows: int, wide: bool) -> None:
    values, weight = _eight(rows, 3072), _eight(1536, 3072)
    bias = torch.randn(1536, device="cuda", dtype=torch.bfloat16)
    whole = torch.zeros(rows, 2048 if wide else 1536, device="cuda", dtype=torch.float8_e4m3fn)
    out = whole[:, 512:] if wide else whole
    scales = [torch.tensor([scale], device="cuda") for scale in (0.001, 0.002, 60.0)]
    multiply(values, weight, scales, bias, out, gelu=True)
    exact = (values.double() * 0.001) @ (weight.double() * 0.002).t() + bias.double()
    exact = torch.nn.functional.gelu(exact, approximate="tanh")
    got = out.double() / 60.0
    assert (got - exact).norm() < 0.04 * exact.norm()
    assert (got - exact).abs().max() < 0.07 * exact.abs().max()
    if wide:
        assert not whole[:, :512].view(torch.uint8).any(), "what lies beside is not written"


@pytest.mark.parametrize("rows", [1, 77, 512])
def test_gelu_is_part_of_the_product_in_bf16(rows: int) -> None:
    values = torch.randn(rows, 3072, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1536, 3072, device="cuda", dtype=torch.bfloat16) * 0.02
    bias = torch.randn(1536, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, 1536, device="cuda", dtype=torch.bfloat16)
    exact = values.double() @ weight.double().t() + bias.double()
    multiply(values, weight, (), bias, out)
    assert (out.double() - exact).norm() < 0.003 * exact.norm()
    onto = torch.randn_like(out)
    added = torch.empty_like(out)
    multiply(values, weight, (), bias, added, onto=onto)
    assert (added.double() - exact - onto.double()).norm() < 0.003 * exact.norm()
    multiply(values, weight, (), bias, out, gelu=True)
    tanh = torch.nn.functional.gelu(exact, approximate="tanh")
    assert (out.double() - tanh).norm() < 0.003 * tanh.norm()


@pytest.mark.parametrize(("outputs", "inputs"), [(9216, 3072), (12288, 3072), (3072, 12288)])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8 to e4m3"])
def test_all_algorithms_write_the_same_bits(outputs: int, inputs: int, kind: str) -> None:
    """Which one is the fastest depends on the day; images must not."""
    quantizes, bf16 = kind == "fp8 to e4m3", kind == "bf16"
    for rows in (77, 512, 4608):
        values, weight = _eight(rows, inputs), _eight(outputs, inputs)
        if bf16:
            values, weight = values.bfloat16() / 60, weight.bfloat16() / 600
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
        scales = [torch.tensor([scale], device="cuda") for scale in (0.001, 0.002, 60.0)]
        scales = [] if bf16 else scales if quantizes else scales[:2]
        epilogue: Epilogue = "gelu_bias" if quantizes else "none"
        plan = Plan(
            Kind(rows, outputs, inputs, inputs, outputs, quantizes, epilogue, bf16, workspace_bytes=0), 0, 6
        )
        results = []
        for algorithm in range(len(plan.algorithms)):
            dtype = torch.float8_e4m3fn if quantizes else torch.bfloat16
            out = torch.zeros(rows, outputs, device="cuda", dtype=dtype)
            plan(values, weight, scales, bias if quantizes else None, None, out, algorithm)
            results.append(out.view(torch.uint8 if quantizes else torch.int16))
        differing = [index for index, out in enumerate(results) if not torch.equal(out, results[0])]
        assert len(results) > 1
        assert not differing, (rows, differing)


def test_scales_by_row_as_pytorch() -> None:
    values, weight = _eight(512, 3072), _eight(1024, 3072)
    rows, outputs = torch.rand(512, 1, device="cuda"), torch.rand(1, 1024, device="cuda")
    out = torch.empty(512, 1024, device="cuda", dtype=torch.bfloat16)
    Plan(Kind(512, 1024, 3072, 3072, 1024, quantizes=False, by_row=True), 0)(
        values, weight, [rows, outputs], None, None, out
    )
    expected = torch._scaled_mm(
        values, weight.t(), rows, outputs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    assert (out.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_another_number_of_rows_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    time_all = cublas_lt._timed
    monkeypatch.setattr(
        cublas_lt, "_timed", lambda plan, operands: timed.append(1) or time_all(plan, operands)
    )
    weight, scales = _eight(1408, 3072), [torch.tensor([scale], device="cuda") for scale in (0.001, 0.002)]
    for rows in (4136, 4142, 4209):
        values, out = _eight(rows, 3072), torch.empty(rows, 1408, device="cuda", dtype=torch.bfloat16)
        multiply(values, weight, scales, None, out)
        exact = (values.double() * 0.001) @ (weight.double() * 0.002).t()
        assert (out.double() - exact).norm() < 0.004 * exact.norm()
    assert len(timed) == 1
