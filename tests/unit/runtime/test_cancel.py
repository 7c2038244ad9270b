"""Calls of a session can be cancelled from another thread, and followed step by step."""

import threading
from typing import Any

import pytest
import torch

import vivace
from vivace.errors import Cancelled
from vivace.runtime.session import Session

STEPS = 6
RECIPES = [
    "baseline",
    "deepcache(2)",
    "cfg_cutoff(0.4)",
    "scheduler(dpmpp_2m)",
]


def draw(session: Session) -> Any:
    output = session(
        "a red circle",
        num_inference_steps=STEPS,
        output_type="pt",
        generator=torch.Generator("cpu").manual_seed(0),
    )
    return output.images


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow("scheduler*", "cfg*")
def test_a_cancelled_call_ends_at_its_step_and_leaves_the_next_one_right(recipe: str) -> None:
    session = vivace.load("tiny-sd", recipe, device="cpu")
    expected = draw(session)
    steps: list[int] = []

    def cancel_at_the_third(step: int, latents: torch.Tensor, height: int, width: int) -> None:
        steps.append(step)
        assert latents.dim() == 4
        assert (height, width) == (128, 128)
        if step == 3:
            thread = threading.Thread(target=session.cancel)
            thread.start()
            thread.join()

    session.on_step = cancel_at_the_third
    with pytest.raises(Cancelled):
        draw(session)
    assert steps == [1, 2, 3]
    session.on_step = None
    assert not session.cancel(), "no call is in progress"
    assert torch.equal(draw(session), expected)


def test_a_transformer_is_cancelled_too() -> None:
    session = vivace.load("tiny-flux", "first_block_cache(0.1)", device="cpu")
    expected = draw(session)
    session.on_step = lambda step, *_: session.cancel() if step == 2 else None
    with pytest.raises(Cancelled):
        draw(session)
    session.on_step = None
    assert torch.equal(draw(session), expected)
