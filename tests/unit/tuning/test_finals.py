"""The final of a search: who is in it, and the images that are added until each verdict is decided."""

import dataclasses

import numpy as np
import pytest

from benchmarks.recorded_grids import Grid, read_grid
from benchmarks.tuner_grids import RESULTS
from benchmarks.tuner_timed import timed_replay
from tests.make import make_record, make_round
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.stats import Gate, Interval
from vivace.foundation.stats.sequential import sure_of_each
from vivace.models.find import find_model
from vivace.models.prompts import PROMPT_SETS
from vivace.report.fidelity import Fidelity, KeptShare, Worst
from vivace.report.quality_gate import Judgement
from vivace.report.rows import Row, rows_of
from vivace.tuning.final.finals import ImagePlan
from vivace.tuning.search.search import portfolio
from vivace.tuning.search.timetable import FINAL_ROUNDS
from vivace.tuning.settings import ImageRequest

SIZES = (13, 26, 39, 78)
PLAN = ImagePlan((WorkloadRequest(),) * 4, SIZES, (13, 26, 39, 39))


def passed_at_the_limit(level: float, number: int = 20_000) -> float:
    """Return how often recipes pass at some look whose images lie exactly at the limit."""
    images = np.random.default_rng(0).standard_normal((number, SIZES[-1]))
    sums = np.cumsum(images, axis=1)[:, np.array(SIZES) - 1]
    boundary = {0.95: 1.6449}.get(level) or float(
        np.quantile(np.random.default_rng(1).standard_normal(10**6), level)
    )
    return float((sums / np.sqrt(SIZES) > boundary).any(axis=1).mean())


def test_all_looks_together_pass_no_more_at_the_limit_than_one() -> None:
    assert passed_at_the_limit(0.95) > 0.09, "as sure each time is wrong more often"
    assert passed_at_the_limit(sure_of_each(0.95, SIZES)) == pytest.approx(0.05, abs=0.008)
    assert sure_of_each(0.95, (13,)) == 0.95


def row_with(bounds: Interval, judgement: Judgement) -> Row:
    """Return the row of a recipe that changes the image."""
    records = [make_record(text, make_round(0, (1.8, 1.8, 1.8))) for text in ("baseline", "steps(8)")]
    kept = KeptShare(bounds, bounds, Worst("a red circle", 0.9, 1), 0.9)
    fidelity = Fidelity(13, 0, 13, None, None, None, clip=kept)
    return dataclasses.replace(
        rows_of(records)[1], fidelity=fidelity, judgement=judgement, limits=Limits(clip=0.985)
    )


def test_a_look_has_to_be_surer_than_the_only_one() -> None:
    passed = Judgement(Gate.PASSED, "kept", "clip")
    barely, clearly = Interval(1.0, 0.986, 1.01), Interval(1.0, 0.996, 1.004)
    verdicts = []
    for bounds in (barely, clearly):
        (row,) = PLAN.with_verdicts([row_with(bounds, passed)])
        assert row.judgement is not None
        assert row.fidelity is not None
        assert row.fidelity.clip is not None
        assert row.fidelity.clip.bounds.low < bounds.low
        verdicts.append(row.judgement.gate)
    assert verdicts == [Gate.UNCLEAR, Gate.PASSED]


def test_a_portfolio_holds_what_passes_almost_surely() -> None:
    """Three bold recipes of one kind pass together in six worlds of ten, and a slow one always."""
    rng = np.random.default_rng(0)
    together = rng.random((1000, 1)) < 0.6
    bold = np.where(together, np.array([[1.8, 1.7, 1.6]]), 0.0)
    safe, useless = np.full((1000, 1), 0.1), np.zeros((1000, 1))
    worlds = np.hstack([bold, useless, safe])
    assert portfolio(worlds, 0.0, [0, 1, 2]) == [4, 0, 1, 2], (
        "the safest comes first, and nothing useless is added"
    )
    assert portfolio(worlds[:, :4], 0.0, [0]) == [0], "others of the kind do not make it surer"
    assert portfolio(worlds, 0.0, [4]) == [4]


def test_where_variety_is_asked_the_first_images_have_two_seeds_a_prompt() -> None:
    located = find_model("tiny-sd")
    prompts = PROMPT_SETS[located.prompt_set]
    plan = ImagePlan.of(located, ImageRequest(), prompts, seeds=2)
    assert plan.sizes == (14, 26, 39, 52, 91)
    assert plan.num_prompts == (7, 13, 26, 39, 39)
    assert [batch.num_seeds for batch in plan.batches[:2]] == [2, 2]
    assert ImagePlan.of(located, ImageRequest(), prompts).sizes == (13, 26, 39, 78)
    own = ImagePlan.of(located, ImageRequest(prompts=tuple(prompts[:8])), prompts[:8], seeds=2)
    assert own.sizes[:2] == (12, 16), "a verdict needs six prompts"


@pytest.fixture(scope="module")
def tiny_sd() -> Grid:
    return read_grid(RESULTS / "tuner-grid-tiny-sd.json")


@pytest.mark.parametrize(("minutes", "slow"), [(4.0, 1.0), (8.0, 2.0)])
@pytest.mark.quick("8.0*")
def test_searches_by_the_clock_hold_an_answer_from_their_first_half_on(
    tiny_sd: Grid, minutes: float, slow: float
) -> None:
    """Each final draws new images, thirteen at first, and everything takes its time."""
    for seed in range(2):
        search, machine = timed_replay(tiny_sd, minutes, seed, slow=slow)
        pick = search.pick()
        assert pick is not None, seed
        assert pick.least_gain is not None
        assert pick.least_gain > 0
        assert len(machine.logs[pick.recipe]) >= FINAL_ROUNDS
        assert not tiny_sd.entries[pick.recipe].is_below_the_limit
        assert machine.finals_s[0] < 0.5 * 60 * minutes
        assert machine.now < 1.05 * 60 * minutes


def test_a_search_that_may_draw_no_more_images_proves_something_safe(tiny_sd: Grid) -> None:
    """A final is a portfolio, so that one finalist passes by its first images alone."""
    for seed in range(2):
        search, _ = timed_replay(tiny_sd, 4.0, seed, looks=1)
        assert search.pick() is not None, seed
