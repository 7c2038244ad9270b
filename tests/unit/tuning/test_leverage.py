"""How much a technique can give beside others, and what a baseline that waits for the CPU says of captured launches."""

import dataclasses
import math

import numpy as np
import pytest

from vivace.foundation.spec.record import Outcome
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.model.by_model import (
    Leverage,
    ModelSampler,
    captures,
)
from vivace.tuning.model.priors import PriorSource, effects
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


STAGES = (("text", 0.05), ("steps", 4.8), ("vae", 0.1), ("other", 0.05))
OBJECTIVE = Objective(same_picture_only=True, without=("compile", "offload", "layerwise_casting"))
RECORDS = PriorSource(
    "records of a faster host",
    tuple(
        Datum(resolve(text), gain, 0.05)
        for text, gain in [
            ("cuda_graph", math.log(1.04)),
            ("fuse_qkv", math.log(1.2)),
            ("fuse_qkv+cuda_graph", math.log(1.22)),
            ("channels_last+inference_mode", math.log(1.3)),
        ]
    ),
)


def baseline(busy: float | None) -> Result:
    measured = Result(Recipe(), Outcome.MEASURED, Rung.SCREENED, 0.0, 0.01, seconds=5.0, stages_s=STAGES)
    return dataclasses.replace(measured, busy_share=busy)


def first_two(busy: float | None) -> list[Recipe]:
    """Return the first two recipes that a search measures, where the GPU is busy in a share of the time."""
    space = Space.of(OBJECTIVE)
    prior = effects(space.options, dict(STAGES), OBJECTIVE)
    sampler = ModelSampler(space, np.random.default_rng(0), (RECORDS,), prior)
    history, tried = [baseline(busy)], []
    while len(tried) < 2:
        recipe = sampler.ask(history, 1)[0]
        gain = math.log(1 / (busy or 1.0)) if captures(recipe) else 0.0
        history.append(dataclasses.replace(baseline(None), recipe=recipe, gain=gain))
        tried.append(recipe)
    return tried


def test_what_ends_the_waits_is_tried_first_whatever_other_hosts_say() -> None:
    assert any(captures(recipe) for recipe in first_two(0.44))
    assert not any(captures(recipe) for recipe in first_two(0.99))
