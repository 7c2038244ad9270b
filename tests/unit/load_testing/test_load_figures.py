"""Figures of loads whose truth is known."""

import json
from collections.abc import Sequence

import pytest

from vivace.benchmark.load_testing.load_figures import figures_of, lone_latencies, throughput_ratio
from vivace.benchmark.load_testing.load_report import compared, render
from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage, RequestSettings, Samples

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
    assert figures.throughput.point == pytest.approx(0.5)
    assert (figures.throughput.low, figures.throughput.high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert figures.latency_s[50].point == pytest.approx(2.0)
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
    assert figures.throughput.point == pytest.approx(batch, rel=0.02)


def test_goodput_counts_what_comes_in_time_of_all_that_was_asked_for() -> None:
    due = [0.5 * k for k in range(100)]
    ended = [each + (0.2 if k % 4 else 0.9) for k, each in enumerate(due)]
    outcome = ["HTTP 429" if k % 10 == 1 else "done" for k in range(100)]
    load = row(samples(due, ended, outcome), LoadStage(kind="poisson", fraction=0.8), rate=2.0, slo_s=(0.6,))
    figures = figures_of(load)
    assert (figures.num_requests, figures.num_done, figures.errors) == (100, 90, {"HTTP 429": 10})
    good = sum(k % 4 != 0 and k % 10 != 1 for k in range(100)) / 100
    assert figures.within_slo is not None
    assert figures.goodput is not None
    assert figures.within_slo.point == pytest.approx(good)
    assert figures.goodput.point == pytest.approx(2 * good)
    assert figures.goodput.low < figures.goodput.point < figures.goodput.high


def test_that_all_came_in_time_is_no_proof_that_all_will() -> None:
    due = [0.5 * k for k in range(100)]
    load = row(samples(due, [d + 0.1 for d in due]), LoadStage(kind="poisson", fraction=0.5), 2.0, (0.6,))
    within = figures_of(load).within_slo
    assert within is not None
    assert within.point == within.high == 1.0
    assert within.low is not None
    assert 0.7 < within.low < 0.99


def test_a_percentile_without_samples_beyond_it_has_no_interval() -> None:
    due = [float(k) for k in range(60)]
    figures = figures_of(row(samples(due, [d + 0.1 + 0.001 * (k % 7) for k, d in enumerate(due)])))
    assert figures.latency_s[50].low is not None
    assert figures.latency_s[99].low is None


def test_latency_counts_from_when_the_user_came() -> None:
    due = [float(k) for k in range(20)]
    load = row(samples(due, [d + 5.0 for d in due], late=4.0), LoadStage(kind="poisson", fraction=0.5), 1.0)
    figures = figures_of(load)
    assert figures.latency_s[50].point == 5.0
    assert figures.lag_s == pytest.approx(4.0)


def test_the_latency_alone_is_that_of_each_size() -> None:
    settings = SETTINGS.model_copy(update={"variants": (("64x64", "a"), ("96x96", "a"), ("64x64", "b"))})
    few = samples([0.0, 1.0], [0.5, 3.0]).model_copy(update={"variant": (0, 1)})
    assert lone_latencies(row(few, settings=settings)) == (0.5, 2.0, 0.5)


def test_two_servers_are_compared_load_by_load() -> None:
    slow = row(samples([2.0 * k for k in range(30)], [2.0 * k + 2 for k in range(30)]))
    fast = row(samples([1.0 * k for k in range(30)], [1.0 * k + 1 for k in range(30)]))
    ratio = throughput_ratio(fast, slow)
    assert ratio is not None
    assert ratio.point == pytest.approx(2.0)
    (line,) = compared([fast], [slow])
    assert line == "1 client, over here: images/s 2.00x [2.00, 2.00], p50 0.50x [0.50, 0.50]"


def test_a_load_without_any_image_has_a_row_all_the_same() -> None:
    load = row(
        samples([0.0, 1.0], [0.1, 1.1], ["timeout"] * 2), LoadStage(kind="closed", clients=2), None, (1.0,)
    )
    figures = figures_of(load)
    assert (figures.throughput.point, figures.latency_s, figures.errors) == (0.0, {}, {"timeout": 2})
    for format_ in ("table", "md", "csv"):
        assert "2 timeout" in render([load], format_)
    assert json.loads(render([load], "json"))[0]["done"] == 0
