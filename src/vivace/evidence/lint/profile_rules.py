"""Rules for tables of profilers: shares, self times, totals and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vivace.evidence.lint.findings import Fault, Reading, is_above, written

_SELF = (("self_cpu", "cpu", "CPU"), ("self_cuda", "cuda", "CUDA"))
_TUNING = (
    "InductorBenchmarker",
    "CachingAutotuner",
    "benchmark_all_configs",
    "benchmark_gpu",
    "compile_inner",
)


def percentages(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A part is at most the whole."""
    for row in rows:
        for role, number in row.numbers.items():
            if (role.endswith("percent") or role == "share") and (number.least > 100 or number.most < 0):
                advice = "whether a label on the GPU's timeline is counted as if it were a kernel"
                if role == "share":
                    advice = "how it was measured"
                yield Fault(row, written(row, role), "a share of a whole is never above 100 %", advice)


def self_percentages_add_up(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Self times are disjoint."""
    for role in ("self_cpu_percent", "self_cuda_percent"):
        filled = [row for row in rows if row.has(role)]
        if len(filled) > 1 and sum(row[role].least for row in filled) > 100.0001:
            total = sum(row[role].value for row in filled)
            yield Fault(
                None, f"{role.replace('_', ' ')} of {len(filled)} rows: {total:.2f} % together",
                "self times exclude each other, so their shares add up to 100 % at most",
                "rows that are counted twice: a kernel for its operator and under its own name, labels beside kernels",
            )  # fmt: skip


def self_within_total(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A row's self time is a part of its total."""
    for row in rows:
        for own, total, _ in _SELF:
            if row.has(own, total) and is_above(row[own], row[total]):
                yield Fault(
                    row, written(row, own, total), "the total includes the self time",
                    "whether the columns are swapped",
                )  # fmt: skip


def average_times_calls(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Calls times the average is the total."""
    for row in rows:
        for total, average in (("cpu", "cpu_avg"), ("cuda", "cuda_avg")):
            if not row.has(total, average, "calls"):
                continue
            calls = row["calls"].value
            least, most = row[average].least * calls, row[average].most * calls
            if row[total].least > most * 1.0001 or row[total].most < least * 0.9999:
                yield Fault(
                    row, written(row, total, average, "calls"), "calls times the average is not the total",
                    "which of the three is wrong",
                )  # fmt: skip


def counted_twice(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The same GPU time in two rows of a profile is one kernel, listed for its operator and for itself."""
    first_rows: dict[tuple[float, float], Reading] = {}
    for row in rows:
        if not row.has("self_cuda", "calls") or row["self_cuda"].value <= 0:
            continue
        key = (row["self_cuda"].value, row["calls"].value)
        before = first_rows.setdefault(key, row)
        if before is not row and row["self_cuda"].value > 2 * row["self_cuda"].half_ulp * 100:
            yield Fault(
                row, f"{written(row, 'self_cuda', 'calls')}, as {before.label} in line {before.line}",
                "the same kernels are counted in both rows",
                "whether the table lists kernels beside the operators that launch them",
                "doubtful",
            )  # fmt: skip


def tuning_inside(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Compiling and autotuning do not belong in a measured window."""
    for row in rows:
        name = row.texts.get("label", "")
        if row.has("calls") and any(mark in name for mark in _TUNING):
            yield Fault(
                row, written(row, "cpu", "cuda", "calls"), "kernels were compiled or tuned while the call was profiled",
                "that the profile starts after the warm-up; times and shares of this table include tuning",
                "doubtful",
            )  # fmt: skip
