"""The verdict in one sentence, and how figures are written everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from vivace.report.rows import Row
from vivace.spec.record import Outcome
from vivace.stats import Interval, Verdict


def summary(rows: Sequence[Row]) -> str:
    """What the table says, in words that claim no more than its intervals allow."""
    if not rows:
        return "Nothing has been measured yet."
    baseline = rows[0]
    if baseline.latency is None:
        return f"The reference {baseline.recipe} was not measured: {baseline.reason}. Nothing can be compared with it."
    ruined = [r for r in rows if r.ruined is not None]
    faster = [
        r for r in rows[1:] if r.verdict is Verdict.FASTER and r.speedup is not None and r.ruined is None
    ]
    failed = sum(1 for r in rows if r.outcome is not Outcome.MEASURED)
    tail = "".join(f" {r.recipe} is broken: {r.ruined}." for r in ruined)
    tail += f" {failed} of {len(rows)} recipes could not be measured; the table says why." if failed else ""
    if not faster:
        if len(rows) == 1:
            return f"{seconds(baseline.latency.median.point)} an image with {baseline.recipe}." + tail
        return f"No recipe was faster than {baseline.recipe} beyond the noise of this measurement." + tail
    best = max(faster, key=lambda r: r.speedup.point if r.speedup else 0.0)
    assert best.speedup is not None
    assert best.latency is not None
    sentence = (
        f"{best.recipe} is the fastest: {ratio(best.speedup)} the speed of {baseline.recipe}, "
        f"{seconds(best.latency.median.point)} an image instead of {seconds(baseline.latency.median.point)}"
    )
    if best.memory is not None and baseline.memory is not None:
        sentence += f", peak memory {size(best.memory.peak_bytes)} ({change(best, baseline)})"
    if not best.record.trial.recipe.same_picture:
        sentence += ". It changes the picture: compare the pictures before you trust it"
    return sentence + "." + tail


def fidelity(row: Row) -> str:
    """The pictures against the baseline's: "45.2, 38.1" (mean and worst PSNR, dB) or "identical".

    Empty without a quality pass.
    """
    found = row.fidelity
    if found is None:
        return ""
    if found.psnr_db is None:
        return "identical" if found.num_identical == found.num_pictures else "not comparable"
    return f"{found.psnr_db.point:.1f}, {found.worst_psnr_db:.1f}"


def change(row: Row, baseline: Row) -> str:
    """ "-3 %": peak memory against the baseline's."""
    assert row.memory is not None
    assert baseline.memory is not None
    percent = round(100 * (row.memory.peak_bytes / baseline.memory.peak_bytes - 1))
    return "unchanged" if percent == 0 else f"{percent:+d} %"


def seconds(value: float) -> str:
    """Three significant figures, in s or ms."""
    if value < 0.1:
        return f"{value * 1000:#.3g} ms"
    return f"{value:.0f} s" if value >= 99.95 else f"{value:#.3g} s"


def plus_minus(interval: Interval) -> str:
    """ "0.784 s ±1.2 %", or without the interval where there were too few samples."""
    width = interval.half_width
    return seconds(interval.point) + ("" if width is None else f" ±{100 * width:.1f} %")


def ratio(interval: Interval) -> str:
    """ "1.52x [1.49, 1.55]"."""
    text = f"{interval.point:.2f}x"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low:.2f}, {interval.high:.2f}]"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as GPU vendors and seeds' tables write them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:#.3g} {unit}".replace(". ", " ")
    return f"{num_bytes:.0f} B"
