"""What the growth of a soak's memory is."""

import numpy as np

from benchmarks.serving_soak_rows import growth


def test_growth_is_that_of_a_thousand_requests_once_settled() -> None:
    requests = list(range(100, 10_100, 100))
    noise = np.random.default_rng(0).normal(0, 2e5, 100)
    filling = [5e8 - 1e8 * max(0.0, 1 - number / 2000) for number in requests]
    steady = growth(requests, filling + noise)
    assert steady.low is not None
    assert steady.low < 0 < steady.high, "what fills at first does not count"
    leaking = growth(requests, filling + noise + 1e5 * np.array(requests) / 1000)
    assert leaking.low > 0
    assert leaking.low < 1e5 < leaking.high
