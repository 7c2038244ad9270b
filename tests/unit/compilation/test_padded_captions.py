"""One graph of Z-Image's transformer serves captions of several lengths, with a capture that runs on a CPU."""

from typing import Any

import numpy as np
import pytest

from tests import flow_models
from tests.targets import target_of
from tests.unit.techniques.test_cuda_graph import GPU, capture
from vivace.techniques.cuda_graph import CudaGraph

MODEL = "z-image-turbo"
PROMPTS = ["a star", "a red star on a blue field", "words " * 20, "words " * 30, "words " * 60]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)


def with_graphs(pipe: Any) -> Any:
    return CudaGraph().apply(target_of(machine=GPU, pipe=pipe))


@pytest.mark.parametrize("recipe", ["baseline", "fused(bf16)", "fused(fp8)"])
@pytest.mark.quick("fused(fp8)*", "baseline*")
def test_images_have_the_same_bits(recipe: str) -> None:
    """Captions of 9 to 68 tokens, which the transformer makes 32, 64 and 96."""
    plain, session = (flow_models.session(MODEL, recipe) for _ in range(2))
    effect = with_graphs(session.pipe)
    for prompt in PROMPTS:
        assert np.array_equal(flow_models.draw(session, prompt), flow_models.draw(plain, prompt)), prompt
    assert effect.evidence()["cuda_graphs_recorded"] == 3
    assert effect.evidence()["cuda_graph_replays"] == flow_models.STEPS * len(PROMPTS)


def test_captions_of_a_batch_are_padded_apart() -> None:
    prompts = ["a star", "words " * 40]
    plain, session = (flow_models.session(MODEL) for _ in range(2))
    effect = with_graphs(session.pipe)
    for pair in (prompts, ["words", "words " * 41]):
        expected = flow_models.draw(plain, list(pair))
        assert np.array_equal(flow_models.draw(session, list(pair)), expected)
    assert effect.evidence()["cuda_graphs_recorded"] == 1
