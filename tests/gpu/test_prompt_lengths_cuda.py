"""CUDA graphs for prompts of several lengths: `python -m pytest -m gpu tests/gpu/test_prompt_lengths_cuda.py`."""

from typing import Any

import pytest
import torch

import vivace
from tests import flow_models
from tests.gpu import test_fused_cuda as of_fused
from vivace.techniques.cuda_graph import CudaGraph
from vivace.techniques.fused import Fused

pytestmark = pytest.mark.gpu

PROMPTS = ["a star", "a red star", "words " * 9, "words " * 40, "words " * 41, ["a star", "words " * 30]]


def pipeline(model: str) -> Any:
    """A small model in bf16 on the GPU."""
    return vivace.apply(flow_models.pipeline(model).to("cuda"), "bf16").pipe


def embedded(pipe: Any, prompt: str | list[str]) -> torch.Tensor:
    with torch.no_grad():
        embeddings = pipe.encode_prompt(prompt if isinstance(prompt, str) else list(prompt))[0]
    return (torch.cat(embeddings) if isinstance(embeddings, list) else embeddings).float()


def difference(made: torch.Tensor, expected: torch.Tensor) -> float:
    assert made.shape == expected.shape
    return float((made - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("qwen-image", "trim_text+cuda_graph@text_encoder"),
        ("qwen-image-2.1", "cuda_graph@text_encoder"),
        ("cogview4-6b", "cuda_graph@text_encoder"),
        ("z-image-turbo", "trim_text+cuda_graph@text_encoder"),
        ("flux2-klein-4b", "trim_text+cuda_graph@text_encoder"),
        ("flux2-dev", "trim_text+cuda_graph@text_encoder"),
    ],
)
def test_embeddings_are_those_without_graphs(model: str, recipe: str) -> None:
    pipe = pipeline(model)
    expected = [embedded(pipe, prompt) for prompt in PROMPTS]
    session = vivace.apply(pipe, recipe)
    for _ in range(2):
        for prompt, plain in zip(PROMPTS, expected, strict=True):
            assert difference(embedded(session.pipe, prompt), plain) < 0.01
    evidence = session.evidence()
    # Of one prompt and of two; graphs are of 32, 64 and 128 tokens, or of 512.
    assert 2 <= evidence["cuda_graphs_recorded"] <= 5
    assert evidence["cuda_graph_replays"] >= 2 * len(PROMPTS)


@pytest.mark.parametrize("model", ["qwen-image", "z-image-turbo", "flux2-klein-4b"])
def test_fp8_in_graphs(model: str) -> None:
    """Each token has a scale of its own, so padding does not change that of others."""
    expected = embedded(pipeline(model), "a red star")
    rounded = vivace.apply(pipeline(model), "trim_text+quantize(fp8)@text_encoder")
    session = vivace.apply(pipeline(model), "trim_text+quantize(fp8)@text_encoder+cuda_graph@text_encoder")
    plain = embedded(rounded.pipe, "a red star")
    for _ in range(3):
        assert difference(embedded(session.pipe, "a red star"), plain) < 0.03
    assert difference(plain, expected) < 0.08
    assert session.evidence()["cuda_graphs_recorded"] == 1


@pytest.mark.parametrize("knobs", [None, {"precision": "bf16"}, {"precision": "fp8", "attention": "fp8"}])
@torch.no_grad()
def test_a_graph_of_z_image_serves_captions_of_several_lengths(knobs: Any) -> None:
    """Which the transformer makes 64 and 96 tokens, and in a batch 32 and 96."""
    made = of_fused.z_image()
    if knobs is not None:
        Fused(**knobs).apply(of_fused.target(made))
    calls = [
        of_fused.inputs_of_z_image(words, 32, 48) for words in ((33,), (40,), (64,), (77,), (5, 90), (30, 70))
    ]
    expected = [torch.stack(made(**call)[0]) for call in calls]
    effect = CudaGraph().apply(of_fused.target(made))
    for _ in range(2):
        for call, plain in zip(calls, expected, strict=True):
            assert difference(torch.stack(made(**call)[0]).float(), plain.float()) < 0.005
    assert effect.evidence is not None
    assert effect.evidence() == {"cuda_graphs_recorded": 3, "cuda_graph_replays": 2 * len(calls)}
