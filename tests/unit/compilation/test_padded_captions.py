"""One graph of Z-Image's transformer serves captions of several lengths, with a capture that runs on a CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import flow_models
from tests.targets import target_of
from tests.unit.techniques.test_cuda_graph import GPU, capture
from vivace.machinery.compilation.captured import captured_forward
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


def test_arguments_may_be_named() -> None:
    transformer = flow_models.pipeline(MODEL).transformer
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(16, 1, 16, 16, generator=generator)]
    captions = [[torch.randn(length, 64, generator=generator)] for length in (32, 5, 31)]
    time = torch.tensor([0.5])
    with torch.no_grad():
        expected = [transformer(latents, time, caption)[0][0] for caption in captions]
        with_graphs(SimpleNamespace(transformer=transformer))
        made = [transformer(x=latents, t=time, cap_feats=caption)[0][0] for caption in captions]
    for ours, plain in zip(made, expected, strict=True):
        assert torch.equal(ours, plain)
    graphs = captured_forward(transformer)
    assert graphs is not None
    assert graphs.num_captured == 1
    call: Any = ((), {"x": latents, "t": time, "cap_feats": captions[1]})
    assert graphs.has(*call)
    graphs.forget(*call)
    assert not graphs.has(*call)
