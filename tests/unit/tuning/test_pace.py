"""Estimates of time, and what is expected of more images."""

import pytest

from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Interval
from vivace.recipes.resolve import resolve
from vivace.tuning.model.peaks import Peaks, recorded
from vivace.tuning.search.pace import Pace
from vivace.tuning.search.results import Result, Rung, expected_low


def screened(text: str, seconds: float, first_call_s: float) -> Result:
    return Result(
        resolve(text), Outcome.MEASURED, Rung.SCREENED, 0.1, seconds=seconds, first_call_s=first_call_s
    )


def test_compiling_is_expected_to_take_long_until_it_was_measured() -> None:
    pace = Pace(on_gpu=True, base_s=1.0)
    whole, blocks = resolve("compile"), resolve("compile(blocks=repeated)")
    assert pace.of_trial(whole) > 3 * pace.of_trial(blocks) > 3 * pace.of_trial(resolve("channels_last"))
    assert pace.of_compiling(resolve("compile(max-autotune)")) > 200
    pace.learn([screened("compile", 1.0, 13.0)])
    assert pace.of_compiling(whole) == 12.0
    assert pace.of_compiling(resolve("tiny_vae+compile")) == pytest.approx(
        20.0
    )  # other code, if the cache has none


def test_a_final_counts_first_calls_images_and_what_comparisons_took_before() -> None:
    pace = Pace(on_gpu=True, base_s=5.0)
    assert pace.repeats == 3
    plain = pace.of_final([screened("tiny_vae", 2.0, 2.0)], 2, 0)
    assert pace.of_final([screened("compile", 2.0, 22.0)], 2, 0) == pytest.approx(plain + 10)
    assert pace.of_final([screened("tiny_vae", 2.0, 2.0)], 2, 39) > plain + 30 * 7
    for _ in range(3):
        pace.note(calls_s=10.0, rounds=1, seconds=30.0)
    assert pace.of_final([screened("tiny_vae", 2.0, 2.0)], 2, 0) > plain + 60


def test_more_images_raise_the_bound_and_leave_it_uncertain() -> None:
    few = Interval(0.994, 0.979, 1.009)
    low, error, luck = expected_low(few, 6, 6, 22.5)
    assert 0.979 < low < 0.994
    assert error > luck > 0.002, "of six images more is unknown than what 22 others will add"
    assert expected_low(few, 6, 6, 0.0)[0] == pytest.approx(0.979)
    assert expected_low(Interval(0.9, None, None), 2, 2, 13.0)[0] == 0.9


def test_what_has_no_prediction_takes_no_less_than_without_it() -> None:
    graph, both = resolve("cuda_graph"), resolve("tiny_vae+cuda_graph")
    predictions = {resolve("baseline"): 12e9, resolve("tiny_vae"): 7e9, graph: None, both: None}
    peaks = Peaks(lambda recipes: [predictions[recipe] for recipe in recipes])
    assert peaks.least([graph, both, resolve("tiny_vae")]) == [12e9, 7e9, 7e9]
    assert peaks.of(graph) is None


def test_records_have_peaks_where_nothing_is_predicted() -> None:
    graph, eager = resolve("fused(fp8)+cuda_graph"), resolve("baseline")
    peaks = Peaks(lambda recipes: [12e9 if recipe == eager else None for recipe in recipes])
    peaks.ask([eager, graph])
    mine = recorded("sdxl", 1024, 1024)
    peaks.add(mine)
    assert peaks.of(graph) == mine[graph] == pytest.approx(10.5e9, rel=0.02)
    assert peaks.of(eager) == 12e9, "a prediction is of this machine"
    assert recorded("sdxl", 64, 64) == {}
