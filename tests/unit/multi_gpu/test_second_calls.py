"""Guidance in two calls, the second of which a peer computes while the first is computed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests import flow_models
from tests.forked_peers import forked_peers
from vivace.errors import Unsupported
from vivace.machinery.multi_gpu.sharded_denoiser import SecondCalls

MODEL = "qwen-image"


class Peer:
    """Computes what is sent, when it is asked for."""

    def __init__(self) -> None:
        self.calls = SecondCalls(self.send, self.receive)
        self.pending: list[dict[str, Any]] = []
        self.num_computed = 0

    def send(self, kwargs: dict[str, Any]) -> None:
        self.pending.append(kwargs)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        (kwargs,), self.pending = self.pending, []
        self.num_computed += 1
        output = denoise(**kwargs)
        assert output.shape == like.shape
        return output

    def step(self, latents: torch.Tensor, *others: dict[str, Any]) -> list[torch.Tensor]:
        """Make the calls of a step; return what differs from what they should be."""
        made = []
        for other in others:
            kwargs = {"hidden_states": latents, "timestep": torch.tensor(0.5)} | other
            made.append(self.calls.call(denoise, kwargs)[0] - denoise(**kwargs))
        return made


def denoise(
    hidden_states: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **_: Any
) -> torch.Tensor:
    return hidden_states * timestep + text


COND, UNCOND = ({"text": torch.full((2,), value), "shapes": [1, 2]} for value in (1.0, 2.0))


@pytest.mark.parametrize(
    "others",
    [
        (COND, UNCOND, {"text": torch.full((2,), 3.0), "shapes": [1, 2]}),
        (COND, UNCOND | {"shapes": [3]}),
        (COND, {"text": UNCOND["text"]}),
    ],
)
def test_calls_of_another_kind_are_right(others: tuple[dict[str, Any], ...]) -> None:
    peer = Peer()
    peer.step(torch.randn(2), COND, UNCOND)
    for _ in range(3):
        assert not torch.cat(peer.step(torch.randn(2), *others)).any()
    peer.calls.end()
    assert not peer.pending


def test_an_image_with_another_timestep_in_the_second_call_is_no_image() -> None:
    peer = Peer()
    peer.step(torch.randn(2), COND, UNCOND)
    peer.step(torch.randn(2), COND, UNCOND | {"timestep": torch.tensor(0.25)})
    with pytest.raises(Unsupported, match="another timestep or size than the first"):
        peer.calls.end()
    peer.calls.end()


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    peer = Peer()
    peer.step(torch.randn(2), COND, UNCOND)
    latents = torch.randn(2)
    peer.step(latents, COND)
    peer.calls.end()
    assert not peer.pending
    assert not torch.cat(peer.step(latents, UNCOND)).any()
    assert peer.calls.num_shared == 0


@pytest.fixture
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    "recipe", ["fused(bf16)+parallel(cfg)", pytest.param("parallel(cfg)", marks=pytest.mark.long)]
)
def test_an_image_is_the_same(recipe: str) -> None:
    alone = flow_models.session(MODEL, recipe.replace("parallel(cfg)", "").strip("+") or "baseline")
    shared = flow_models.session(MODEL, recipe)
    for prompt in (flow_models.PROMPT, "a star"):
        assert np.array_equal(flow_models.draw(shared, prompt), flow_models.draw(alone, prompt))
    facts = shared.evidence()
    assert (facts["forwards_shared"], facts["forwards_alone"]) == (2 * (flow_models.STEPS - 1), 2 * 2)
    assert shared.refuted(facts) is None
    shared.close()
