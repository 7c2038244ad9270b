"""Searches by replay: recorded grids answer in the place of a machine, with noise."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recorded_grids import FixedSpace, Grid, read_grid
from benchmarks.tuner import (
    Simulated,
    fails_gate,
    gate_figures,
    least_regret,
    regret,
    regret_by_all_rounds,
    replay,
    trials_of,
)
from benchmarks.tuner_grids import RESULTS
from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate, Verdict
from vivace.recipes.resolve import resolve
from vivace.report.rows import priced, rows_of
from vivace.tuning.answer import Tuned
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import PriorSource, effects
from vivace.tuning.model.regression import Datum
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.search import Search
from vivace.tuning.search.space import Space
from vivace.tuning.search.timetable import Budget
from vivace.tuning.tuner import endings, unmet

GRIDS = ("tiny-sd", "tiny-flux", "flux-dev-h200")


def grid(name: str) -> Grid:
    return read_grid(RESULTS / f"tuner-grid-{name}.json")


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.quick("tiny-flux", "flux-dev*")
def test_only_what_passed_its_final_is_proposed(name: str) -> None:
    """Of the search's logic alone: the simulated final is the record's own verdict."""
    recorded = grid(name)
    without = ("records",) if "h200" in name else ()
    searches = [replay(recorded, "model", trials_of(recorded, 0.1), seed, without) for seed in range(2)]
    assert any(search.pick() is not None for search in searches)
    for search in searches:
        assert not fails_gate(recorded, search)
        assert search.num_trials <= trials_of(recorded, 0.1)


@pytest.mark.parametrize(
    ("name", "limit", "by_all_rounds"),
    [("tiny-sd", 0.02, 0.02), ("tiny-flux", 0.02, 0.02), ("flux-dev-h200", 0.005, 0.005)],
)
@pytest.mark.long
@pytest.mark.exhaustive("tiny-sd*")
def test_a_tenth_of_the_trials_comes_near_the_best(name: str, limit: float, by_all_rounds: float) -> None:
    """flux-dev without the records that the grid is made of: from published studies and the first trials.

    The limits are what was reached, by fifteen seeds: which five are unlucky changes with each record.
    docs/tuning.md says where the goal of 2 % is missed.
    """
    recorded = grid(name)
    without = ("records",) if "h200" in name else ()
    searches = [replay(recorded, "model", trials_of(recorded, 0.1), seed, without) for seed in range(15)]
    assert np.median([regret(recorded, search) for search in searches]) <= limit
    assert np.median([regret_by_all_rounds(recorded, search) for search in searches]) <= by_all_rounds
    assert least_regret(recorded) < 0.005, "the rounds that a search may see name the best recipe"


@pytest.mark.long
def test_proposals_pass_by_other_images_too() -> None:
    """Finals draw new images here, so luck in the final could propose what the record's mean refuses."""
    figures = gate_figures(grid("tiny-sd"), 4)
    assert figures["proposed"] >= 3
    assert figures["failed"] == 0


def made(recipes: list[str], seed: int = 0, **fields: object) -> Search:
    """Return a search on the grid of tiny-flux in which only some recipes exist."""
    recorded = grid("tiny-flux")
    entries = {resolve(text): recorded.entries[resolve(text)] for text in ["baseline", *recipes]}
    small = dataclasses.replace(recorded, entries=entries)
    objective = Objective(**fields)
    space = FixedSpace([resolve(text) for text in recipes], objective)
    simulated = Simulated(small, np.random.default_rng(seed))
    return Search(objective, space, ModelSampler(space, np.random.default_rng(0)), simulated, Budget(9))


def test_a_recipe_that_fails_is_never_proposed() -> None:
    search = made(["prune", "first_block_cache(0.3)"], seed=1)
    pick = search.run()
    assert pick is not None
    assert pick.recipe.text == "first_block_cache(0.3)"
    assert {trial.recipe.text for trial in search.history} >= {"prune", "first_block_cache(0.3)"}


def test_limits_of_memory_are_kept_and_a_looser_one_is_named() -> None:
    """The baseline and what is fastest take 472 MB and more here; with a tiny VAE it is 457 MB."""
    fastest = "dtype(bf16)+first_block_cache(0.3)+steps(8)"
    recipes = ["tiny_vae", "seacache", "tiny_vae+seacache", "steps(8)", "first_block_cache(0.3)", fastest]
    unlimited = made(recipes).run()
    assert unlimited is not None
    assert unlimited.recipe.text == resolve(fastest).text
    search = made(recipes, max_memory_bytes=460e6)
    pick = search.run()
    assert pick is not None
    assert pick.recipe.text == "tiny_vae+seacache"
    assert pick.peak_bytes < 460e6
    (looser,) = answer(pick, *search.history, objective=search.objective).looser
    assert looser.limit == "--max-memory"
    assert looser.result.recipe.text == resolve(fastest).text
    nothing = made(recipes, max_memory_bytes=1.0)
    assert nothing.run() is None
    assert "--max-memory 1 B was not met; nearest is" in " ".join(unmet(nothing))


def test_an_interrupted_search_goes_on_from_its_history() -> None:
    first = made(["first_block_cache(0.3)", "tiny_vae", "seacache"])
    first.budget = Budget(2)
    first.run()
    second = made(["first_block_cache(0.3)", "tiny_vae", "seacache"])
    second.history = list(first.history)
    measured: list[str] = []
    screen = second.measurer.screen
    second.measurer.screen = lambda recipes: (measured.extend(r.text for r in recipes), screen(recipes))[1]
    second.run()
    assert len(measured) == 1
    assert measured[0] not in {trial.recipe.text for trial in first.history}


def test_what_a_final_has_shown_to_pass_is_measured_with_all_that_works() -> None:
    """The decoder's gain is known from another recipe, and it leaves the path of the latents as it is."""
    path, whole = "first_block_cache(0.3)+steps(8)", "tiny_vae+first_block_cache(0.3)+steps(8)"
    search = made(["tiny_vae", "steps(8)", "first_block_cache(0.3)", path, whole])
    search.history = [
        result("baseline", 0.0),
        result("tiny_vae", 0.2, rung=Rung.JUDGED, slack=0.01),
        result("steps(8)", 0.3, rung=Rung.JUDGED, slack=0.01),
        result("first_block_cache(0.3)", 0.3, rung=Rung.JUDGED, slack=0.01),
        result(path, 0.6, rung=Rung.FINAL, slack=0.01),
    ]
    pick = search.history[-1]
    assert [unmeasured.recipe.text for unmeasured in search.propose_unmeasured([pick])] == [
        resolve(whole).text
    ]
    search.budget = Budget(search.num_trials)
    assert search.propose_unmeasured([pick]) == [], "no trial is left for it"
    search.history.append(result(whole, 0.75, rung=Rung.JUDGED, gate=Gate.FAILED, slack=-0.05))
    assert search.propose_unmeasured([pick]) == []


def test_a_stored_recipe_is_one_rival_among_what_techniques_promise() -> None:
    """The demo's recipe is known to be 1.8 times as fast; weights for four steps of thirty promise more."""
    space = Space.of(Objective())
    stored = PriorSource("this store", (Datum(resolve("tiny_vae+cfg_cutoff(0.4)+steps(20)"), 0.6, 0.1),))
    stages = {"steps": 0.9, "vae": 0.05, "text": 0.05}
    promises = effects(space.options, stages, Objective(), 30)
    sampler = ModelSampler(space, np.random.default_rng(0), (stored,), promises)
    history = [result("baseline", 0.0, stages_s=tuple(stages.items()))]
    (first,) = sampler.ask(history, 4)
    assert [technique.name for technique in first] == ["distilled"]
    proven = result(first.text, 1.7, stages_s=(("steps", 0.12), ("vae", 0.05), ("text", 0.05)))
    search = made(["tiny_vae"])
    search.sampler, search.space, search.history = sampler, space, [*history, proven]
    (better,) = search.propose_unmeasured([proven])
    assert better.recipe == resolve(f"{first.text}+tiny_vae"), (
        "a decoder that declares what it saves, never measured"
    )
    assert better in search.finalists([better], over=proven)


def result(text: str, gain: float, **fields: object) -> Result:
    measured = Result(
        resolve(text), Outcome.MEASURED, Rung.FINAL, gain, 0.01, 0.01, Gate.PASSED, 1.0, 1e9, 1.0
    )
    return dataclasses.replace(measured, **fields)


def answer(pick: Result, *others: Result, objective: Objective | None = None) -> Tuned:

    everything = (pick, *others)
    return Tuned(
        "tiny-sd",
        "a CPU",
        objective or Objective(),
        pick,
        (),
        everything,
        {},
        (),
        Path(".vivace"),
        True,
        3,
        60.0,
    )


def test_neighbours_say_why_they_lost() -> None:
    pick = result("tiny_vae+steps(8)", 0.5)
    slow = result("tiny_vae", 0.1)
    ruined = result("tiny_vae+steps(12)", 0.6, gate=Gate.FAILED)
    reasons = {n.change: n.reason for n in answer(pick, slow, ruined).neighbours}
    assert reasons["without steps(8)"] == "49 % slower"
    assert reasons["without tiny_vae"] == "not measured"
    assert reasons["steps(12) instead of steps(8)"] == "its quality fails"


def test_a_looser_limit_is_named_with_what_it_buys() -> None:
    objective = Objective(max_memory_bytes=2e9)
    pick, large = result("tiny_vae", 0.1), result("steps(8)", 0.9, peak_bytes=3e9)
    assert [
        (looser.limit, looser.result.recipe.text)
        for looser in answer(pick, large, objective=objective).looser
    ] == [("--max-memory", "steps(8)")]
    assert answer(pick, large, objective=objective).why_lost(large) == "it takes more memory than allowed"


def test_a_slower_recipe_is_the_answer_where_the_baseline_breaks_the_limit() -> None:
    search = made(["tiny_vae"], max_memory_bytes=1e9)
    search.history = [
        result("baseline", 0.0, peak_bytes=2e9),
        result("tiny_vae", -0.4, peak_bytes=5e8),
    ]
    pick = search.pick()
    assert pick is not None
    assert pick.recipe.text == "tiny_vae"
    search.history[0] = result("baseline", 0.0, peak_bytes=9e8)
    assert search.pick() is None


def test_an_answer_without_a_recipe_says_how_each_ended() -> None:
    history = [
        result("baseline", 0.0),
        result("steps(8)", 0.9, gate=Gate.FAILED),
        result("steps(12)", 0.6, gate=Gate.FAILED),
        result("tiny_vae", -0.1),
        Result(resolve("compile"), Outcome.CRASHED, Rung.SCREENED, reason="no compiler"),
        Result(resolve("cuda_graph"), Outcome.UNSUPPORTED, Rung.SCREENED, reason="one GPU"),
    ]
    assert list(endings(history)) == [
        "of 4 recipes tried: 2 better, but the quality fails, 1 no better than the baseline, 1 crashed"
    ]
    assert not list(endings(history[:1]))


def test_the_answer_says_what_images_cost() -> None:
    records = [
        make_record("baseline", make_round(0, (1.8, 1.8, 1.8))),
        make_record("tiny_vae", make_round(0, (0.9, 0.9, 0.9))),
    ]
    pick = result("tiny_vae", 0.69)
    priced_answer = dataclasses.replace(answer(pick), rows=tuple(priced(rows_of(records), 2.0)))
    assert re.search(r"^cost +0\.5 per 1,000 images instead of 1\.00$", str(priced_answer), re.MULTILINE)
    assert "\ncost " not in str(dataclasses.replace(priced_answer, rows=tuple(rows_of(records))))


def test_what_bench_calls_unclear_is_not_called_proven() -> None:
    rounds = {"baseline": 1.8, "tiny_vae": 0.9}
    rows = rows_of(
        [make_record(text, *(make_round(k, (s, s, s)) for k in range(2))) for text, s in rounds.items()]
    )
    for verdict in (Verdict.FASTER, Verdict.UNCLEAR):
        final = (rows[0], dataclasses.replace(rows[1], verdict=verdict))
        tuned = dataclasses.replace(answer(result("tiny_vae", 0.69)), rows=final)
        assert tuned.to_json()["proven"] is (verdict is Verdict.FASTER)
        assert tuned.to_json()["pick"]["rung"] == "final"
        assert ("unclear" in str(tuned).partition("Run it")[0]) is (verdict is Verdict.UNCLEAR)


def test_a_verdict_before_the_final_says_of_how_many_images() -> None:
    screened = result("steps(8)", 0.9, rung=Rung.JUDGED, images=6, seconds=0.4)
    text = str(answer(result("tiny_vae", 0.69), screened))
    assert "passed by 6 images" in text
    assert answer(screened).to_json()["front"][0]["images"] == 6


def test_of_recipes_that_are_as_fast_the_shortest_is_the_answer() -> None:
    search = made(["tiny_vae"])
    long, short = "tiny_vae+dtype(bf16)+steps(8)", "tiny_vae+steps(8)"
    for loss, own_error, expected in [
        (0.008, 0.0, short),
        (0.012, 0.0, long),
        (0.02, 0.015, short),  # 1.96 * 0.015 * sqrt(2) is 4 %
        (0.035, 0.1, long),
    ]:
        fields = {"own_error": own_error}
        search.history = [
            result("baseline", 0.0),
            result(long, 0.5, **fields),
            result(short, 0.5 - loss, **fields),
            result("dtype(bf16)", 0.5 - loss / 2, gate=Gate.UNCLEAR),  # not proven
            result("channels_last", 0.494),  # another recipe, not a shorter one
        ]
        pick = search.pick()
        assert pick is not None
        assert pick.recipe.text == expected, (loss, own_error)
    search.history.append(result("channels_last+tf32", 0.496))  # nor slower by anything that could be told
    pick = search.pick()
    assert pick is not None
    assert pick.recipe.text == "channels_last+tf32"
