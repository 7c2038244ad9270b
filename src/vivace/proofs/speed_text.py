"""The answer to "Fast?" as printed: the latency of both sides, and a line for each load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.benchmark.load_testing.load_figures import figures_of
from vivace.benchmark.load_testing.load_report import as_dict, errors_text, figure_text
from vivace.benchmark.load_testing.load_rows import LoadRow
from vivace.foundation.stats import EquivalenceTest
from vivace.foundation.untrusted.terminal_text import plain
from vivace.proofs.fast import SpeedAnswer
from vivace.proofs.side_loads import SideLoad


def load_in_words(load: SideLoad) -> str:
    """Return a load as a sentence, e.g. B, 8 clients: 2.1 images/s, p50 3.8 s, ..."""
    if load.row is None:
        return f"{load.side}: no load was measured: {load.reason}"
    figures = figures_of(load.row)
    parts = [f"{figure_text([figures.throughput])} images/s"]
    parts += [f"p{p} {figure_text([figures.latency_s[p]])} s" for p in (50, 95) if p in figures.latency_s]
    if figures.within_slo is not None:
        parts.append(f"in time {figure_text([figures.within_slo], percent=True)}")
    if figures.goodput is not None:
        parts.append(f"goodput {figure_text([figures.goodput])}/s")
    parts += [f"{number} {plain(kind)}" for kind, number in figures.errors.items()]
    return f"{load.side}, {name_of(load.row)}: {', '.join(parts)}"


def name_of(row: LoadRow) -> str:
    """Return the name of a load, with the rate of users and its program."""
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    by = " by AIPerf" if row.client.get("engine") == "aiperf" else ""
    return f"{row.stage.name}{rate}{by}"


def in_time(loads: Sequence[SideLoad]) -> str:
    """Return a note on which images are in time; "" where no load has a limit."""
    slos = sorted({round(slo, 3) for load in loads if load.row is not None for slo in load.row.slo_s})
    return " or ".join(f"{slo:g} s" for slo in slos)


def cells_of(row: LoadRow) -> list[str]:
    """Return a load's figures: requests, images a second, p50, p95, in time, goodput, errors."""
    figures = figures_of(row)
    values = (figures.throughput, *(figures.latency_s.get(p) for p in (50, 95)))
    return [
        str(figures.num_requests),
        *(figure_text([value]) or "–" for value in values),
        figure_text([figures.within_slo], percent=True) or "–",
        figure_text([figures.goodput]) or "–",
        errors_text(figures.errors),
    ]


def speed_dict(speed: SpeedAnswer) -> dict[str, Any]:
    """Return the figures as JSON values."""
    test = speed.test
    return {
        "a_median_s": speed.a_s,
        "b_median_s": speed.b_s,
        "pairs": speed.num_pairs,
        "log_ratio": _interval(test),
        "log_ratio_to_a_again": _interval(speed.after),
        "margin": None if test is None else test.margin,
        "prompts_needed": None if test is None else test.needed,
        "loads": [
            {"side": load.side} | ({"reason": load.reason} if load.row is None else as_dict(load.row))
            for load in speed.loads
        ],
    }


def _interval(test: EquivalenceTest | None) -> dict[str, Any] | None:
    if test is None:
        return None
    low, high = test.interval.low, test.interval.high
    return {"mean": test.interval.point, "interval90": None if low is None else [low, high]}
