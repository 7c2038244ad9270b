"""How much a technique can give beside others that change the shares of the time."""

import math

import numpy as np
import pytest

from vivace.foundation.spec.record import Outcome
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.leverage import Leverage
from vivace.tuning.model.priors import effects
from vivace.tuning.model.regression import Datum, Prior, Regression
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.space import Space

LONG = (("text", 0.01), ("steps", 0.94), ("vae", 0.05))
SHORT = (("text", 0.01), ("steps", 0.14), ("vae", 0.05))


def result(text: str, stages: tuple[tuple[str, float], ...], rung: Rung = Rung.JUDGED) -> Result:
    return Result(resolve(text), Outcome.MEASURED, rung, gain=0.0, stages_s=stages)


def weight(leverage: Leverage, text: str, name: str) -> float:
    recipe = resolve(text)
    technique = next(technique for technique in recipe if technique.name == name)
    return leverage.of_effect(recipe, technique, technique.targets)


MEASURED = Leverage.of([result("baseline", LONG), result("distilled(lcm, steps=4)", SHORT)])


def test_a_decoder_gives_more_beside_few_steps() -> None:
    assert weight(MEASURED, "tiny_vae", "tiny_vae") == 1.0, "nothing else is in the recipe"
    expected = math.log(1 - 0.05 / 0.20) / math.log(1 - 0.05)
    assert weight(MEASURED, "tiny_vae+distilled(lcm, steps=4)", "tiny_vae") == pytest.approx(expected)


def test_what_a_technique_gave_alone_is_scaled_to_the_recipe() -> None:
    tiny, both = resolve("tiny_vae"), resolve("tiny_vae+distilled(lcm, steps=4)")
    belief = Regression(
        {"tiny_vae": Prior(0.0, 0.2), "distilled(lcm, steps=4)": Prior(1.0, 0.01)}, pair_sd=0.0
    )
    belief.learn([Datum(tiny, 0.05, 0.001)])
    alone = float(belief.estimate([both])[0][0])
    belief.reweigh(MEASURED.of_effect)
    beside = float(belief.estimate([both])[0][0])
    assert alone == pytest.approx(1.05, abs=0.01)
    assert beside == pytest.approx(1.0 + 0.05 * math.log(0.75) / math.log(0.95), abs=0.02)
    assert float(belief.estimate([Recipe()])[0][0]) == 0.0


def test_steps_take_the_place_of_the_steps_that_weights_were_trained_for() -> None:
    assert weight(MEASURED, "distilled(lcm, steps=4)", "distilled") == 1.0
    beside = weight(MEASURED, "distilled(lcm, steps=4)+steps(20)", "distilled")
    assert 0 < beside < 0.5, "20 steps are taken: only the guidance is left out"
    assert weight(MEASURED, "distilled(lcm, steps=4)+steps(20)", "steps") > 0


def test_a_search_that_begins_with_fewer_steps_tries_trained_weights_without_them() -> None:
    rng, start = np.random.default_rng(0), resolve("tiny_vae+steps(20)")
    texts = ("distilled(lcm, steps=4)", "tiny_vae", "steps(20)")
    options = [technique for text in texts for technique in resolve(text)]
    space = Space(Objective(), options)
    sampler = ModelSampler(space, rng, effects=effects(options, dict(LONG), Objective(), num_steps=25))
    quality = {"slack": 0.02, "slack_error": 0.005}
    history = [
        Result(resolve("baseline"), Outcome.MEASURED, Rung.JUDGED, gain=0.0, stages_s=LONG),
        Result(start, Outcome.MEASURED, Rung.JUDGED, gain=0.4, error=0.05, stages_s=LONG, **quality),
    ]
    proposals = [recipe for _ in range(2) for recipe in sampler.ask(history, 1)]
    assert all("distilled" in {part.name for part in recipe} for recipe in proposals)
    assert not [
        recipe.text for recipe in proposals if {"distilled", "steps"} <= {part.name for part in recipe}
    ]
