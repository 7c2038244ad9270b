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
from vivace.runtime.sharing import sharing_weights

CALL = {"height": 128, "width": 128, "num_inference_steps": STEPS, "strength": STRENGTH}
QUICK = [
    ("tiny-sd", "tiny_vae"),
    ("tiny-sd", "distilled(lcm, steps=4)+scheduler(lcm)"),
    ("tiny-flux", "quantize(int8)"),
]
OTHERS = [recipe for name, recipe in RECIPES if name != "compile"]


def _marks(position: int, number: int) -> object:
    """Each recipe is tried on one model by `make test-long`, on both by `make soak`."""
    return pytest.mark.long if number % 2 == position else pytest.mark.soak


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
            pytest.param(model, recipe, marks=_marks(position, number))
            for position, model in enumerate(("tiny-sd", "tiny-flux"))
            for number, recipe in enumerate(OTHERS)
        ),
    ],
)
def test_it_draws_what_a_session_of_the_task_draws(model: str, recipe: str) -> None:
    try:
        text = text_session(model, recipe)
    except (Unsupported, NoEffect) as error:
        pytest.skip(str(error))
    with text:
        before = from_text(text)
        for task in ("image", "inpaint"):
            try:
                shared = sharing_weights(text, task, model)
            except Unsupported:
                if not any(technique.belongs_to_pipeline for technique in text.recipe):
                    with pytest.raises(Unsupported):
                        open_session(model, task, recipe)
                return
            drawn = draw(shared)
            with open_session(model, task, recipe) as alone:
                if not any(technique.needs_prompts for technique in text.recipe):
                    assert np.array_equal(drawn, draw(alone)), task
            assert np.array_equal(from_text(text), before)


def test_a_technique_of_one_pipeline_is_named() -> None:
    text = text_session("tiny-sd", "cfg_cutoff(0.5)+tiny_vae")
    with pytest.raises(
        Unsupported, match=r"cfg_cutoff\(0.5\) belongs to the text-to-image pipeline, and the task"
    ):
        sharing_weights(text, "image", "tiny-sd")
    with pytest.raises(Unsupported, match="its weights are not trained to edit images"):
        sharing_weights(text_session("tiny-sd", "tiny_vae"), "edit", "tiny-sd")
