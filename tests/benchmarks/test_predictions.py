"""The page that holds predictions against times that others published."""

from dataclasses import replace

import pytest

from docgen import predictions
from docgen.predictions import FIGURES, Published, Scored, scored, summary
from vivace.foundation.stats import Interval

L20 = FIGURES[0]


def of(seconds: float, card: str = "L20") -> Scored:
    figure = replace(L20, card=card, seconds=seconds)
    return Scored(figure, Interval(10.0, 8.0, 12.0), "NVIDIA H200")


def test_hits_and_misses_are_counted_as_they_are() -> None:
    text = summary([of(9.0), of(20.0), of(8.0, "H100")])
    assert "2 of 3 lie inside" in text
    assert "1 of 2 on other cards" in text
    assert "1 of 1 on an H100" in text


def test_a_miss_is_told_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "FIGURES", (L20,))
    monkeypatch.setattr(predictions, "scored", lambda _: of(20.0))
    assert "no: 2.00 of it" in predictions.page("")


@pytest.mark.parametrize("figure", [L20, FIGURES[-1]], ids=lambda each: each.model)
def test_a_prediction_does_not_know_the_card(figure: Published) -> None:
    answer = scored(figure)
    assert figure.card not in answer.origin
    assert 0 < (answer.predicted.low or 0) < answer.predicted.point < (answer.predicted.high or 0)
    twice = scored(replace(figure, steps=2 * figure.steps))
    assert twice.predicted.point == pytest.approx(2 * answer.predicted.point)


def test_a_time_is_predicted_for_the_size_that_was_published() -> None:
    ideogram = FIGURES[-1]
    own = scored(replace(ideogram, plan="")).predicted
    assert scored(ideogram).predicted.point < 0.5 * own.point, "1024 px instead of 2048"


def test_one_cards_records_hold_for_its_sibling() -> None:
    inside, pairs = predictions.between_cards()
    assert pairs > 100
    assert inside / pairs > 0.95


def test_every_figure_has_a_source() -> None:
    assert all("](https://" in figure.source for figure in FIGURES)
