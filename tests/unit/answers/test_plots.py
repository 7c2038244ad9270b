"""Points where their axes say, labels that can be read, and the Pareto front."""

import itertools
import math
from xml.etree import ElementTree

import pytest

from vivace.answers.answer import Bar, BarPart, Bars, Plot, PlotPoint
from vivace.answers.page import svg_of
from vivace.answers.plots import draw, front
from vivace.foundation.stats import Interval


def plot(*at: tuple[float, float], spread: float = 0.01) -> Plot:
    points = [
        PlotPoint(
            Interval(x, x * (1 - spread), x * (1 + spread)),
            Interval(y, None, None),
            "same",
            "",
            n,
            f"recipe {n}",
        )
        for n, (x, y) in enumerate(at, 1)
    ]
    return Plot("Speed and memory", "speed-up", "MB", tuple(points), better="less", is_ratio=True)


def test_faster_is_right_and_lighter_is_low() -> None:
    drawn = draw(plot((1.0, 900), (2.0, 300)))
    slow, fast = drawn.points
    assert fast.x > slow.x
    assert fast.y > slow.y  # y grows downwards
    assert fast.x_span is not None
    assert fast.x_span[0] < fast.x < fast.x_span[1]
    assert drawn.y.low == 0


def test_the_front_is_what_no_other_beats() -> None:
    assert front([(1, 5), (2, 4), (1.5, 3), (3, 1), (2, 1)]) == [0, 1, 3]
    assert front([(1, 1), (1, 1)]) == [0, 1], "equals do not beat each other"
    assert front([(1, 1), (1, 2), (2, 2)]) == [2]
    assert front([]) == []
    drawn = draw(plot((1.0, 400), (1.3, 500), (2.0, 450), (1.6, 600)))
    light, fast = drawn.front
    assert [p.point.number for p in drawn.front] == [1, 3]
    assert drawn.steps == f"{light.x},{light.y} {light.x},{fast.y} {fast.x},{fast.y}"


@pytest.mark.parametrize("crowd", ["clustered", "equal", "in a line"])
def test_twenty_labels_cover_neither_each_other_nor_a_point(crowd: str) -> None:
    def place(i: int) -> tuple[float, float]:
        if crowd == "equal":
            return 1.0, 450.0
        if crowd == "in a line":
            return 1.0 / (1.0 - i / 40), 450.0
        return (1.0 + (i % 5) / 300, 450 + i % 3 * 0.1) if i % 4 else (1 / (2.0 + i / 9), 1000.0 + i)

    drawn = draw(plot(*map(place, range(20)), spread=0.02))
    boxes = []
    for p in drawn.points:
        assert p.label is not None
        half = 3.4 * len(str(p.point.number))
        boxes.append((p.label[0] - half, p.label[1] - 5.5, p.label[0] + half, p.label[1] + 5.5))
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for (left, top, right, bottom), p in itertools.product(boxes, drawn.points):
        assert math.hypot(max(left - p.x, 0, p.x - right), max(top - p.y, 0, p.y - bottom)) >= 4
    assert all(drawn.left <= b[0] and b[2] <= drawn.right for b in boxes)


def test_a_chart_as_a_file_has_its_text_escaped_and_fetches_nothing() -> None:
    bars = Bars("", (Bar("<b>", "1 s", 1, parts=(BarPart(0, 50, "total"),), marks=(40, 60)),))
    for chart in (plot((1.0, 2), (2.0, 1)), bars):
        svg = svg_of("a & <b>", chart)
        root = ElementTree.fromstring(svg)
        assert root[0].text == "a & <b>"
        assert not [e for e in root.iter() if e.tag.endswith(("script", "image", "a"))]
