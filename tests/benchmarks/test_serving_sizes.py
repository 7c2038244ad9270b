"""Latencies of small images beside large ones: the record, and the arrivals that it is made with."""

import json

import numpy as np

from benchmarks.serving_sizes import RECORD, SizesRow, arrivals


def test_requests_come_at_the_rate_and_in_the_shares_that_are_asked_for() -> None:
    made = arrivals(2000, 4.0, 0.25)
    assert made == arrivals(2000, 4.0, 0.25)
    assert abs(made[-1][0] / 2000 - 0.25) < 0.02
    assert abs(np.mean([is_large for _, is_large in made]) - 0.25) < 0.03


def test_the_record_says_what_the_order_of_the_line_does() -> None:
    short_first, arrival = (SizesRow.model_validate(row) for row in json.loads(RECORD.read_text()))
    assert (short_first.order, arrival.order) == ("short first", "arrival")
    assert np.percentile(short_first.small_s, 99) < np.percentile(arrival.small_s, 99)
    assert len(short_first.small_s) == len(arrival.small_s)
    assert short_first.line.startswith(
        "short first: 64x64 (125, alone 0.23 s) p50 0.51 s, p95 1.55 s, p99 1.77 s"
    )
