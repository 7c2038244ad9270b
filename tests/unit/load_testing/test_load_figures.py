"""Figures of loads whose truth is known."""

import math
from collections.abc import Sequence

import pytest

from vivace.benchmark.load_testing.load_answer import answer_of
from vivace.benchmark.load_testing.load_rows import (
    LoadRow,
    LoadStage,
    RequestSettings,
    Samples,
    figures_of,
    lone_latencies,
)

SETTINGS = RequestSettings(model="m", fields={}, variants=((None, None),), prompts_sha256="0")


def row(
    samples: Samples,
    stage: LoadStage | None = None,
    rate: float | None = None,
    slo_s: tuple[float, ...] = (),
    settings: RequestSettings = SETTINGS,
) -> LoadRow:
    return LoadRow(
        label="here",
        request=settings,
        server={},
        client={},
        began="2026-01-01T00:00:00+00:00",
        stage=stage or LoadStage(kind="closed", clients=1),
        rate=rate,
        slo_s=slo_s,
        samples=samples,
    )


def samples(
    due: Sequence[float], ended: Sequence[float], outcome: Sequence[str] | None = None, late: float = 0.0
) -> Samples:
    return Samples(
        due_s=tuple(due),
        sent_s=tuple(each + late for each in due),
        ended_s=tuple(ended),
        outcome=tuple(outcome or ["done"] * len(due)),
        variant=(0,) * len(due),
    )


def test_a_client_that_gets_an_image_every_two_seconds_has_half_an_image_a_second() -> None:
    alone = row(samples([2.0 * k for k in range(30)], [2.0 * k + 2 for k in range(30)]))
    figures = figures_of(alone)
    assert figures.throughput == pytest.approx(0.5)
    assert figures.latency_s[50] == pytest.approx(2.0)
    assert lone_latencies(alone) == (2.0,)


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_throughput_of_eight_clients_is_the_servers_whatever_its_batches(batch: int) -> None:
    """A server that takes a second for each batch, and eight clients that send again at once."""
    due, ended, free = [], [], [0.0] * 8
    for k in range(80):
        due.append(free[k % 8])
        ended.append(float(k // batch + 1))
        free[k % 8] = ended[-1]
    figures = figures_of(row(samples(due, ended), LoadStage(kind="closed", clients=8)))
    assert figures.throughput == pytest.approx(batch, rel=0.02)


def test_goodput_counts_what_comes_in_time_of_all_that_was_asked_for() -> None:
    due = [0.5 * k for k in range(100)]
    ended = [each + (0.2 if k % 4 else 0.9) for k, each in enumerate(due)]
    outcome = ["HTTP 429" if k % 10 == 1 else "done" for k in range(100)]
    load = row(samples(due, ended, outcome), LoadStage(kind="poisson", fraction=0.8), rate=2.0, slo_s=(0.6,))
    figures = figures_of(load)
    assert (figures.num_requests, figures.num_done, figures.errors) == (100, 90, {"HTTP 429": 10})
    good = sum(k % 4 != 0 and k % 10 != 1 for k in range(10, 100)) / 90
    assert figures.within_slo == pytest.approx(good), "without the beginning, when the queue was empty"
    assert figures.goodput == pytest.approx(2 * good)
    late = figures_of(row(samples(due, [each + 5.0 for each in due], late=4.0)))
    assert (late.latency_s[50], late.lag_s) == (5.0, pytest.approx(4.0)), "from when the user came"


def test_requests_without_an_answer_are_inside_the_percentiles() -> None:
    """A server that refuses one in five at once would be the faster for it."""
    due = [float(k) for k in range(100)]
    outcome = ["HTTP 429" if k % 5 == 0 else "done" for k in range(100)]
    load = row(samples(due, [d + (0.0 if k % 5 == 0 else 1.0) for k, d in enumerate(due)], outcome))
    figures = figures_of(load)
    assert (figures.latency_s[50], figures.latency_s[95]) == (1.0, math.inf)
    answer = answer_of([load])
    assert answer.verdict == "failed"
    assert answer.data[0]["latency_s"]["p95"] is None


def test_the_latency_alone_is_that_of_each_size() -> None:
    settings = SETTINGS.model_copy(update={"variants": (("64x64", "a"), ("96x96", "a"), ("64x64", "b"))})
    few = samples([0.0, 1.0], [0.5, 3.0]).model_copy(update={"variant": (0, 1)})
    assert lone_latencies(row(few, settings=settings)) == (0.5, 2.0, 0.5)


def test_two_servers_are_compared_load_by_load() -> None:
    slow = row(samples([2.0 * k for k in range(30)], [2.0 * k + 2 for k in range(30)]))
    fast = row(samples([1.0 * k for k in range(30)], [1.0 * k + 1 for k in range(30)]))
    (line,) = answer_of([fast], [slow]).sections[1].blocks
    assert line == "1 client, over here: images/s 2.00x, p50 0.50x"
