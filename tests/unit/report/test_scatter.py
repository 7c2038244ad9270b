"""Speed against quality and memory: points where their axes say, labels that can be read, and the Pareto front."""

import itertools
import math

import pytest

from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome, Record
from vivace.report import rows_of
from vivace.report.scatter import Axis, Plot, front, plots


def timed(recipe: str, seconds: float, peak_bytes: float = 450e6, spread: float = 0.01) -> Record:
    round_ = make_round(0, times=tuple(seconds * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1)))
    assert round_.memory is not None
    memory = round_.memory.model_copy(update={"peak_bytes": int(peak_bytes)})
    return make_record(recipe, round_.model_copy(update={"memory": memory}))


def memory_plot(*records: Record) -> Plot:
    (plot,) = plots(rows_of(records))  # without a quality pass there is no other
    return plot


def test_faster_is_right_and_lighter_is_low() -> None:
    missing = make_record("tiny_vae", make_round(0, outcome=Outcome.UNSUPPORTED, reason="not here"))
    plot = memory_plot(timed("baseline", 2.0, 900e6), missing, timed("steps(10)", 1.0, 300e6)).wide
    slow, fast = plot.points
    assert [(p.number, p.kind) for p in plot.points] == [(1, "baseline"), (3, "changed")]
    assert fast.x > slow.x
    assert fast.y > slow.y  # y grows downwards
    assert fast.left is not None
    assert fast.right is not None
    assert fast.left < fast.x < fast.right
    assert fast.description == "2.00×, 300 MB"
    assert plot.starts_at_zero
    assert plot.y_name == "peak memory, MB"


def test_without_a_measured_baseline_there_is_no_speed_to_plot() -> None:
    broken = make_record("baseline", make_round(0, outcome=Outcome.CRASHED, reason="signal 9"))
    assert plots(rows_of([broken, timed("bf16", 1.0), timed("steps(10)", 0.5)])) == ()


def test_the_front_is_what_no_other_beats() -> None:
    assert front([(1, 5), (2, 4), (1.5, 3), (3, 1), (2, 1)]) == [0, 1, 3]
    assert front([(1, 1), (1, 1)]) == [0, 1], "equals do not beat each other"
    assert front([(1, 1), (1, 2), (2, 2)]) == [2]
    assert front([]) == []


def test_the_line_of_the_front_goes_over_its_recipes() -> None:
    plot = memory_plot(
        timed("baseline", 2.0, 400e6),
        timed("bf16", 1.5, 500e6),
        timed("steps(10)", 1.0, 450e6),
        timed("steps(12)", 1.2, 600e6),
    ).wide
    assert [p.number for p in plot.front] == [1, 3]
    light, fast = plot.front
    assert plot.steps == f"{light.x},{light.y} {light.x},{fast.y} {fast.x},{fast.y}"


def test_ticks_are_where_their_label_says() -> None:
    plot = memory_plot(timed("baseline", 0.9, 472e6), timed("steps(10)", 0.4, 451e6)).wide
    assert not plot.starts_at_zero  # 451 and 472 MB would be one line on an axis from zero
    for ticks, point, value in (
        (plot.x_ticks, plot.points[1].x, 0.9 / 0.4),
        (plot.y_ticks, plot.points[1].y, 451.0),
    ):
        assert len(ticks) >= 3
        first, last = (float(t.label.rstrip("×")) for t in (ticks[0], ticks[-1]))
        share = (value - first) / (last - first)
        assert point == pytest.approx(ticks[0].at + share * (ticks[-1].at - ticks[0].at), abs=0.6)


def test_ratios_that_differ_widely_get_equal_distances_for_equal_factors() -> None:
    axis = Axis.of_ratios([0.5, 1, 8], 0, 400, num_ticks=5)
    assert axis.is_log
    at = {tick.label: tick.at for tick in axis.ticks}
    assert at["2×"] - at["1×"] == pytest.approx((at["5×"] - at["1×"]) * math.log(2) / math.log(5), abs=0.2)
    assert not Axis.of_ratios([0.9, 1, 2], 0, 400, num_ticks=5).is_log


@pytest.mark.parametrize(("peak", "unit"), [(5e5, "kB"), (5e8, "MB"), (3e10, "GB")])
def test_units_follow_the_size(peak: float, unit: str) -> None:
    assert (
        memory_plot(timed("baseline", 1.0, peak), timed("bf16", 1.0, peak)).wide.y_name
        == f"peak memory, {unit}"
    )


@pytest.mark.parametrize("crowd", ["clustered", "equal", "in a line"])
def test_twenty_labels_cover_neither_each_other_nor_a_point(crowd: str) -> None:
    def place(i: int) -> tuple[float, float]:
        if crowd == "equal":
            return 1.0, 450e6
        if crowd == "in a line":
            return 1.0 - i / 40, 450e6
        return (1.0 + (i % 5) / 300, 450e6 + i % 3 * 1e5) if i % 4 else (2.0 + i / 9, 1e9 + i * 1e6)

    for scatter in memory_plot(*[timed("baseline", *place(i), spread=0.02) for i in range(20)]).scatters:
        boxes = [
            (p.label_x - half, p.label_y - 5.5, p.label_x + half, p.label_y + 5.5)
            for p in scatter.points
            for half in [3.4 * len(str(p.number))]
        ]
        for a, b in itertools.combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        for (left, top, right, bottom), p in itertools.product(boxes, scatter.points):
            beside = math.hypot(max(left - p.x, 0, p.x - right), max(top - p.y, 0, p.y - bottom))
            assert beside >= 4
        assert all(scatter.left <= b[0] and b[2] <= scatter.right and scatter.top <= b[1] for b in boxes)
