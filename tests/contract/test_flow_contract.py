"""Every technique on a small model of each transformer after FLUX.1: it works, or says in words why not."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.contract.test_technique_contract import LEAST_DB, PROMPTS, RECIPES, psnr
from tests.flow_models import EDITING, MODELS, draw, reference, session
from tests.forked_peers import forked_peers
from vivace.errors import NoEffect, Unsupported
from vivace.techniques import TECHNIQUES

EVERY = 4 * len(MODELS)
"""One recipe in so many is tried on a model in `make test`, another one on each model; `make test-long` tries one in
seven, `make soak` all."""


CHOSEN = dict(
    zip(
        EDITING,
        ("seacache(hits=0.5)", "prompt_cache(32)", "cfg_cutoff(0.4)", "teacache(hits=0.5)"),
        strict=True,
    )
)
"""What `make test` tries on models that edit: what may depend on the image that they are shown."""


def _marks(number: int, position: int) -> object:
    if number % EVERY == 4 * position:
        return ()
    return pytest.mark.long if number % len(MODELS) == position else pytest.mark.soak


CASES = [
    pytest.param(
        model,
        name,
        recipe,
        id=f"{recipe}-{model}",
        marks=_marks(number, position),
    )
    for position, model in enumerate(MODELS)
    for number, (name, recipe) in enumerate(RECIPES)
] + [
    pytest.param(
        model,
        name,
        recipe,
        id=f"{recipe}-{model}",
        marks=()
        if recipe == CHOSEN[model]
        else pytest.mark.long
        if number % 25 == position
        else pytest.mark.soak,
    )
    for position, model in enumerate(EDITING)
    for number, (name, recipe) in enumerate(RECIPES)
]
IDLE = (
    "never hit",
    "no forward had two rows",
    "no unconditional",
    "guidance was off",
    "repeated a prompt",
    "generated one image",
)
"""What may be said of a technique that had nothing to do in one image of few steps."""


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.mark.parametrize(("model", "name", "recipe"), CASES)
def test_a_technique_works_on_flow_models_or_has_a_reason(model: str, name: str, recipe: str) -> None:
    try:
        opened = session(model, recipe)
    except Unsupported as error:
        assert str(error).startswith(f"{name}: ")
        assert len(str(error)) > len(name) + 20
        return
    except NoEffect as error:
        assert error.already_so or "no " in str(error)
        return
    with opened:
        assert next(iter(opened.effects.values())), "a technique reports what it changed"
        prompt = PROMPTS.get(name, "a red circle above a blue square")
        if model in ("qwen-image-edit-2509", "qwen-image-edit-2511") and not isinstance(prompt, str):
            prompt = prompt[0]  # its pipeline takes one
        length = {"max_sequence_length": None} if name == "text_length" else {}
        picture = draw(opened, prompt, **length)[:1]
        reason = opened.refuted({})
        if reason is not None:
            assert any(why in reason for why in IDLE), reason
            assert np.array_equal(picture, reference(model, **length))
            return
        assert np.isfinite(picture).all()
        assert picture.std() > 0.005, "not flat"
        if TECHNIQUES[name].declared.same_picture:
            # Random weights spread rounding more than trained ones do.
            assert psnr(picture, reference(model, **length)) > min(
                20 if model in EDITING else 25, LEAST_DB.get(recipe, 25)
            )
        elif name not in ("tiny_vae", "guidance", "steps"):
            assert not np.array_equal(picture, reference(model, **length)), (
                "it declares that it changes the image"
            )
