"""How far a row is from its device's limit."""

from typing import Any

import pytest

from tests.make import make_record, make_round
from vivace.foundation.spec.ceilings import Ceiling, Ceilings, ComponentWork, Work
from vivace.report.rows import Row, rows_of
from vivace.report.usage import no_limit, usage_table

CEILINGS = Ceilings(
    device="cuda",
    device_name="a GPU",
    driver="1.0",
    torch="2.13.0",
    threads=None,
    measured_at="2026-01-01T00:00:00+00:00",
    seconds=1,
    ceilings=(
        Ceiling(operation="copy", case="", per_s=1e9),
        Ceiling(operation="gemm", precision="bf16", case="small", per_s=0.5e12),
        Ceiling(operation="gemm", precision="bf16", case="large", per_s=1e12),
        Ceiling(operation="attention", precision="bf16", case="", per_s=0.5e12),
    ),
    missing={"gemm fp8": "matmuls in fp8 need compute capability 8.9"},
)


def component(name: str = "denoiser", **fields: Any) -> ComponentWork:
    values: dict[str, Any] = {"calls": 4, "computed": 4, "gemm_flop": 0, "conv_flop": 0, "attention_flop": 0}
    values |= {"gemm": "bf16", "conv": "bf16", "attention": "bf16", "weights_bytes": 0}
    return ComponentWork(component=name, **values | fields)


# 0.2 s of matmuls and convolutions, 0.1 s of attention; the VAE reads weights for 0.05 s, longer than it computes.
WORK = Work(
    components=(
        component(gemm_flop=150 * 10**9, conv_flop=50 * 10**9, attention_flop=50 * 10**9),
        component("vae", calls=1, computed=1, conv_flop=10**9, weights_bytes=50 * 10**6),
    )
)


def row_of(work: Work | None = WORK, busy_s: float | None = 0.6, total_s: float = 1.0) -> Row:
    added = {"work": work, "ceilings": CEILINGS if work else None, "gpu_busy_s": busy_s}
    return rows_of([make_record("baseline", make_round(0, (total_s,) * 5).model_copy(update=added))])[0]


def test_the_time_of_an_image_is_divided_without_rest() -> None:
    limit = row_of().limit
    assert limit is not None
    assert limit.components_s == pytest.approx({"denoiser": 0.3, "vae": 0.05})
    assert limit.limit_s == pytest.approx(0.35)
    assert limit.share == pytest.approx(0.35)
    assert limit.kernels_s == pytest.approx(0.25), "busy, but not at the limit"
    assert limit.outside_s == pytest.approx(0.09), "the stage `other` of the samples"
    assert limit.gaps_s == pytest.approx(0.31)
    parts = (limit.limit_s, limit.kernels_s, limit.gaps_s, limit.outside_s)
    assert sum(part for part in parts if part is not None) == pytest.approx(1.0)
    assert limit.problem is None
    (line,) = usage_table([("row", row_of())]).rows
    texts = [cell.text for cell in line.cells]
    assert texts[1:6] == ["0.350 s", "35 %", "0.250 s", "0.310 s", "90.0 ms"]


def test_a_cache_reads_the_weights_of_the_steps_that_it_computes() -> None:
    read = component(weights_bytes=100 * 10**6)
    assert row_of(Work(components=(read,))).limit.limit_s == pytest.approx(0.4)
    cached = component(weights_bytes=100 * 10**6, computed=1)
    assert row_of(Work(components=(cached,))).limit.limit_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("total_s", "busy_s", "message"),
    [
        (0.25, 0.2, "the limit is 140% of the measured time: the count of operations"),
        (1.0, 0.175, "the limit is 200% of the time in which the GPU was busy: the count of operations"),
    ],
)
def test_faster_than_the_limit_is_an_error_and_is_not_clipped(
    total_s: float, busy_s: float, message: str
) -> None:
    row = row_of(total_s=total_s, busy_s=busy_s)
    assert row.limit is not None
    assert row.limit.share == pytest.approx(0.35 / total_s)
    assert row.limit.kernels_s == pytest.approx(busy_s - 0.35)
    assert any(warning.startswith(message) for warning in row.warnings)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            Work(components=(component(gemm_flop=1, gemm="fp8"),)),
            "gemm fp8 has no measured ceiling: matmuls in fp8 need compute capability 8.9",
        ),
        (Work(reason="it has two GPUs"), "the work of this recipe was not counted: it has two GPUs"),
    ],
)
def test_a_limit_that_cannot_be_known_has_a_reason(work: Work, message: str) -> None:
    limit = row_of(work).limit
    assert limit is not None
    assert limit.limit_s is None
    assert limit.reason == message
    assert row_of(work).to_json()["limit"]["reason"] == message
    assert list(no_limit([("row", row_of(work))])) == [("row", f"no limit: {message}")]
