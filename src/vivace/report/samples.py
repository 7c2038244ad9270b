"""The timed calls of each recipe in order, round by round, so that outliers and drift are visible.

All recipes share one scale, in percent of their own time: an unsteady recipe looks unsteady at any speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.answers.formatting import seconds
from vivace.report.rows import Row

WIDTH, HEIGHT = 1000, 56  # units; the template stretches the width to the page's
_EDGE = 5  # units between the scale's end and the box's
_GAP = 24  # units between two rounds
_SCALES = (0.02, 0.05, 0.1, 0.2, 0.5)
_WITHIN = 0.97  # share of all calls that the scale holds
_MAX_DOTS = 400  # of a recipe


@dataclass(frozen=True)
class RoundLine:
    """A round's median: a horizontal line in units."""

    start: float
    end: float
    y: float


@dataclass(frozen=True)
class Strip:
    """A recipe's calls. `dots` and `beyond` are paths of points, in units; `beyond` are those outside of the scale."""

    number: int
    recipe: str
    failed: bool
    lines: tuple[RoundLine, ...]
    dots: str
    beyond: str
    time: str
    by_round: tuple[str, ...]
    spread: str


@dataclass(frozen=True)
class Strips:
    """The strips of all recipes. `scale` names their upper and lower ends, e.g. "10 %"."""

    scale: str
    strips: tuple[Strip, ...]
    has_beyond: bool
    width: int = WIDTH
    height: int = HEIGHT
    middle: float = HEIGHT / 2


def strips(rows: Sequence[Row]) -> Strips | None:
    """Return the calls of each measured recipe; None if there are fewer than two calls of each."""
    measured = [(n, r, r.latency) for n, r in enumerate(rows, 1) if r.latency is not None]
    if not any(latency.n > 1 for *_, latency in measured):
        return None
    deviations = sorted(
        abs(sample / latency.median.point - 1)
        for *_, latency in measured
        for samples in latency.samples_s
        for sample in samples
    )
    reach = deviations[min(len(deviations) - 1, int(_WITHIN * len(deviations)))]
    scale = next((s for s in _SCALES if s >= reach), _SCALES[-1])
    strips = tuple(
        _strip(number, row, latency.median.point, latency.samples_s, scale)
        for number, row, latency in measured
    )
    return Strips(f"{100 * scale:.0f} %", strips, any(strip.beyond for strip in strips))


def _strip(number: int, row: Row, middle_s: float, rounds: Sequence[Sequence[float]], scale: float) -> Strip:
    def deviation(time_s: float) -> float:
        return time_s / middle_s - 1

    def y(time_s: float) -> float:
        share = max(-1.0, min(1.0, deviation(time_s) / scale))
        return round(HEIGHT / 2 - share * (HEIGHT / 2 - _EDGE), 1)

    thinned = _thinned(rounds)
    width = (WIDTH - _GAP * (len(thinned) - 1)) / sum(map(len, thinned))
    dots: list[str] = []
    beyond: list[str] = []
    lines, start = [], 0.0
    for samples, kept in zip(rounds, thinned, strict=True):
        for k, time_s in enumerate(kept):
            point = f"M{start + (k + 0.5) * width:.0f} {y(time_s):g}h0"
            (dots if abs(deviation(time_s)) <= scale else beyond).append(point)
        end = start + width * len(kept)
        lines.append(RoundLine(round(start, 1), round(end, 1), y(statistics.median(samples))))
        start = end + _GAP
    every = [time_s for samples in rounds for time_s in samples]
    return Strip(
        number=number,
        recipe=row.recipe,
        failed=row.failed_quality,
        lines=tuple(lines),
        dots="".join(dots),
        beyond="".join(beyond),
        time=seconds(middle_s),
        by_round=tuple(seconds(statistics.median(samples)) for samples in rounds),
        spread=f"{_signed(deviation(min(every)))} to {_signed(deviation(max(every)))}",
    )


def _thinned(rounds: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the rounds' calls; if there are very many, the slowest and the fastest of every few neighbours."""
    every = -(-2 * sum(map(len, rounds)) // _MAX_DOTS)
    if every <= 2:
        return list(rounds)
    thin: list[Sequence[float]] = []
    for samples in rounds:
        kept: list[float] = []
        for start in range(0, len(samples), every):
            some = samples[start : start + every]
            ends = {some.index(min(some)), some.index(max(some))}
            kept += [some[i] for i in sorted(ends)]
        thin.append(kept)
    return thin


def _signed(share: float) -> str:
    percent = round(100 * share)
    return f"{'−' if percent < 0 else '+'}{abs(percent)} %"
