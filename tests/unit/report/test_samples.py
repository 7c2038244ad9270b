"""Every timed call is drawn once, in order, where its time says."""

import re

from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome, Record
from vivace.report import rows_of
from vivace.report.samples import HEIGHT, Strip, Strips, strips


def strips_of(*records: Record) -> Strips:
    plotted = strips(rows_of(records))
    assert plotted is not None
    return plotted


def dots(strip: Strip) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", strip.dots)]


def test_calls_stand_in_order_and_slower_ones_higher() -> None:
    times = (1.0, 1.01, 0.99, 1.03, 1.0)
    plotted = strips_of(make_record("baseline", make_round(0, times), make_round(1, times)))
    (strip,) = plotted.strips
    points = dots(strip)
    assert len(points) == 10
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    by_height = sorted(range(5), key=lambda i: -points[i][1])
    assert [times[i] for i in by_height] == sorted(times)
    assert plotted.scale == "5 %"
    assert strip.spread == "−1 % to +3 %"
    first, second = strip.lines
    assert first.end < second.start
    assert all(first.start < x < first.end for x, _ in points[:5])
    assert all(second.start < x < second.end for x, _ in points[5:])


def test_drift_from_round_to_round_moves_the_lines() -> None:
    (strip,) = strips_of(make_record("baseline", make_round(0, (1.0,) * 5), make_round(1, (1.2,) * 5))).strips
    fast, slow = strip.lines
    assert slow.y < HEIGHT / 2 < fast.y
    assert strip.by_round == ("1.00 s", "1.20 s")


def test_an_outlier_stands_at_the_edge_and_does_not_flatten_the_others() -> None:
    steady = tuple(1 + 0.01 * (-1) ** i for i in range(49))
    plotted = strips_of(make_record("baseline", make_round(0, (*steady, 5.0))))
    (strip,) = plotted.strips
    assert plotted.scale == "2 %"
    assert plotted.has_beyond
    assert (len(dots(strip)), strip.beyond.count("M")) == (49, 1)
    assert strip.spread == "−2 % to +395 %"


def test_of_very_many_calls_the_extremes_are_drawn() -> None:
    times = tuple(1 + 0.001 * (i % 7) for i in range(5000))
    (strip,) = strips_of(make_record("baseline", make_round(0, (*times[:2500], 1.009, *times[2500:])))).strips
    points = dots(strip)
    assert 300 < len(points) <= 402
    assert min(y for _, y in points) < min(y for x, y in points if x < 400), "the slowest call is among them"


def test_nothing_measured_has_no_strips() -> None:
    assert (
        strips(rows_of([make_record("baseline", make_round(0, outcome=Outcome.CRASHED, reason="9"))])) is None
    )
    assert strips(rows_of([make_record("baseline", make_round(0, (1.0,)))])) is None
