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
    expected_of_capturing,
    over_the_usual_baseline,
    wait_of,
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


def test_steps_take_the_place_of_the_steps_that_weights_were_trained_for() -> None:
    assert weight(MEASURED, "distilled(lcm, steps=4)", "distilled") == 1.0
    beside = weight(MEASURED, "distilled(lcm, steps=4)+steps(20)", "distilled")
    assert 0 < beside < 0.5, "20 steps are taken: only the guidance is left out"
    assert weight(MEASURED, "distilled(lcm, steps=4)+steps(20)", "steps") > 0


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
    assert not any(captures(recipe) for recipe in first_two(None))
    assert not any(captures(recipe) for recipe in first_two(0.99))


def test_the_waits_are_what_capturing_saves() -> None:
    assert wait_of(baseline(0.44)) == pytest.approx(math.log(1 / 0.44))
    assert 0.9 < wait_of(baseline(0.44), ("denoiser",)) / wait_of(baseline(0.44)) < 1
    assert wait_of(baseline(0.44), ("vae",)) < 0.02
    assert wait_of(baseline(1.02)) == 0.0  # another call was traced than those that were timed
    assert wait_of(baseline(None)) == 0.0


def test_a_traced_recipe_says_what_it_gains_with_its_launches_captured() -> None:
    options = [*resolve("cuda_graph"), *resolve("fuse_qkv")]
    traced = dataclasses.replace(baseline(0.3), recipe=resolve("channels_last"), gain=0.1)
    refusing = dataclasses.replace(baseline(0.3), recipe=resolve("first_block_cache"), gain=0.1)
    expected = expected_of_capturing(
        {result.recipe: result for result in (baseline(0.44), traced, refusing)}, options
    )
    gains = {datum.recipe.text: math.exp(datum.value) for datum in expected}
    assert set(gains) == {"cuda_graph", "channels_last+cuda_graph"}
    assert gains["cuda_graph"] == pytest.approx(1 / 0.46, rel=0.02)
    assert gains["channels_last+cuda_graph"] == pytest.approx(1.105 / 0.33, rel=0.02)


def test_a_recipe_that_keeps_the_gpu_busy_is_compared_with_the_usual_baseline() -> None:
    """The baseline took 5.5, 3.7 and 3.6 s on a shared host, and the recipes 1.33, 1.32 and 1.34."""

    def result_of(text: str, seconds: float, before: float, busy: float | None) -> Result:
        gain = math.log(before / seconds)
        return dataclasses.replace(
            baseline(busy), recipe=resolve(text), seconds=seconds, gain=gain, error=0.2, own_error=0.004
        )

    fused = "fused(fp8)@denoiser,vae+cuda_graph"
    history = [
        baseline(0.6),
        result_of(fused, 1.33, 5.5, 0.94),
        result_of(f"{fused}+tf32", 1.32, 3.7, 0.94),
        result_of(f"{fused}+gpu_postprocess", 1.34, 3.6, 0.94),
        result_of("tf32", 3.65, 3.65, 0.6),
        result_of("channels_last", 3.6, 3.7, None),
    ]
    compared = over_the_usual_baseline(history)
    seconds = [3.68 / math.exp(result.gain or 0.0) for result in compared[1:4]]
    assert seconds == pytest.approx([1.33, 1.32, 1.34], rel=0.01)
    assert [result.error for result in compared[1:4]] == [0.02] * 3
    assert compared[4:] == history[4:], "a recipe that waits as the baseline does is compared beside it"
    assert compared[0] == history[0]
    assert over_the_usual_baseline([baseline(0.6)]) == [baseline(0.6)]

    sampler = ModelSampler(Space.of(OBJECTIVE), np.random.default_rng(0))
    assert sampler.shorter(resolve(f"{fused}+tf32"), history) == resolve(fused)
