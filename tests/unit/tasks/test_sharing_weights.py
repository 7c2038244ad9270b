"""One set of weights that draws from text and from images."""

import numpy as np
import pytest
import torch

from tests.contract.test_technique_contract import RECIPES
from tests.families import load
from tests.unit.tasks.test_tasks import STEPS, STRENGTH, draw, open_session
from vivace.errors import NoEffect, Unsupported
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session

CALL = {"height": 128, "width": 128, "num_inference_steps": STEPS, "strength": STRENGTH}
QUICK = [
    ("tiny-sd", "tiny_vae"),
    ("tiny-sd", "distilled(lcm, steps=4)+scheduler(lcm)"),
    ("tiny-flux", "quantize(int8)"),
]
OTHERS = [(name, recipe) for name, recipe in RECIPES if name != "compile"]
FIRST = set(dict(reversed(OTHERS)).values())
"""The first recipe of each technique."""


def _marks(recipe: str) -> object:
    """`make test-long` tries one recipe of each technique, `make soak` all."""
    return pytest.mark.long if recipe in FIRST else pytest.mark.soak


def text_session(model: str, recipe: str) -> Session:
    return session_of(load(model, "text"), find_model(model), resolve(recipe), "cpu", CALL)


def from_text(session: Session) -> np.ndarray:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(5)
    return np.asarray(session("a red circle", generator=generator, output_type="np").images)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        *QUICK,
        *(
            pytest.param(model, recipe, marks=_marks(recipe))
            for model in ("tiny-sd", "tiny-flux")
            for _, recipe in OTHERS
        ),
    ],
)
@pytest.mark.exhaustive("*parallel(cfg)")
@pytest.mark.quick("tiny-sd-tiny_vae0")
def test_it_draws_what_a_session_of_the_task_draws(model: str, recipe: str) -> None:
    try:
        text = text_session(model, recipe)
    except (Unsupported, NoEffect) as error:
        pytest.skip(str(error))
    with text:
        before = from_text(text)
        for task in ("image", "inpaint"):
            try:
                shared = text.sharing_weights(task, model)
            except Unsupported:
                if not any(technique.facts.belongs_to_pipeline for technique in text.recipe):
                    with pytest.raises(Unsupported):
                        open_session(model, task, recipe)
                return
            drawn = draw(shared)
            with open_session(model, task, recipe) as alone:
                if not any(technique.facts.needs_prompts for technique in text.recipe):
                    assert np.array_equal(drawn, draw(alone)), task
            assert np.array_equal(from_text(text), before)


def test_a_technique_of_one_pipeline_is_named() -> None:
    text = text_session("tiny-sd", "cfg_cutoff(0.5)+tiny_vae")
    with pytest.raises(
        Unsupported, match=r"cfg_cutoff\(0.5\) belongs to the text-to-image pipeline, and the task"
    ):
        text.sharing_weights("image", "tiny-sd")
    with pytest.raises(Unsupported, match="its weights are not trained to edit images"):
        text_session("tiny-sd", "tiny_vae").sharing_weights("edit", "tiny-sd")
