"""Every technique on image-to-image and inpainting of the embedded models: it works, or says why not."""

import functools

import numpy as np
import pytest

from tests.contract.test_technique_contract import LEAST_DB, RECIPES
from tests.unit.tasks.test_tasks import CASES, draw, open_session, psnr, reference
from vivace.errors import NoEffect, Unsupported
from vivace.foundation.spec.workload import Task
from vivace.recipes.resolve import resolve

OTHERS = [recipe for name, recipe in RECIPES if name not in ("parallel", "compile")]


@functools.cache
def batch_reference(model: str, task: Task) -> np.ndarray:
    return draw(open_session(model, task), batch=2)


def _marks(position: int, number: int) -> object:
    """Each recipe is tried in one case by `make test-long`, in all by `make soak`."""
    return pytest.mark.long if number % len(CASES) == position else pytest.mark.soak


@pytest.mark.parametrize(
    ("model", "task", "recipe"),
    [
        pytest.param(*case, recipe, id=f"{recipe}-{'-'.join(case)}", marks=_marks(position, number))
        for position, case in enumerate(CASES)
        for number, recipe in enumerate(OTHERS)
    ],
)
def test_each(model: str, task: Task, recipe: str) -> None:
    batch = 2 if "vae_slicing" in recipe else 1
    try:
        session = open_session(model, task, recipe)
    except (Unsupported, NoEffect) as error:
        pytest.skip(str(error))
    drawn = draw(session, batch=batch)
    expected = reference(model, task) if batch == 1 else batch_reference(model, task)
    assert np.isfinite(drawn).all()
    assert drawn.std() > 0.01
    evidence = session.evidence()
    if "cache_calls" in evidence:
        assert evidence["cache_calls"] == session.pipe.num_timesteps
    (technique,) = resolve(recipe)
    if technique.facts.same_picture:
        assert psnr(drawn, expected) > LEAST_DB.get(recipe, 24)
