"""Language models that encode prompts, with weights and matmuls in fp8."""

from typing import Any

import pytest
import torch

from tests import flow_models
from tests.targets import target_of
from tests.unit.techniques.test_cuda_graph import GPU, capture
from vivace.techniques.cuda_graph import CudaGraph

MODELS = {
    "qwen-image": "text_encoder",
    "qwen-image-2.1": "text_encoder",
    "z-image-turbo": "text_encoder",
    "flux2-klein-4b": "text_encoder",
    "flux2-dev": "text_encoder",
    "sana-1600m": "text_encoder",
    "cogview4-6b": "text_encoder",
    "sd35-medium": "text_encoder_3",
}


def embedded(session: Any, prompt: str = "a red star on a blue field") -> torch.Tensor:
    more = (None, None) if hasattr(session.pipe, "text_encoder_3") else ()
    with torch.no_grad():
        embeddings = session.pipe.encode_prompt(prompt, *more)[0]
    return (embeddings[0] if isinstance(embeddings, list) else embeddings).float()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("flux2-dev")
def test_embeddings_in_fp8_are_near_those_in_bf16(model: str) -> None:
    """Qwen2.5-VL, Qwen3-VL, Qwen3, Mistral, Gemma, GLM and T5, all layers: those of 36 layers are 4 % off."""
    plain, rounded = (
        embedded(flow_models.session(model, recipe))
        for recipe in ("bf16", f"bf16+quantize(fp8)@{MODELS[model]}")
    )
    assert 0 < (rounded - plain).norm() < 0.06 * plain.norm()


@pytest.mark.parametrize("model", ["flux2-klein-4b", "qwen-image", "z-image-turbo"])
def test_fp8_goes_with_graphs_and_without_what_nothing_reads(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has a scale of its own, so padding does not change that of others."""
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    recipe = "bf16+trim_text+quantize(fp8)@text_encoder"
    expected = embedded(flow_models.session(model, recipe))
    session = flow_models.session(model, recipe)
    graphs = CudaGraph(targets=("text_encoder",))
    target = target_of(machine=GPU, pipe=session.pipe)
    assert graphs.unsupported(target) is None
    effect = graphs.apply(target)
    for prompt in ("a star", "a red star on a blue field", "a star"):
        made = embedded(session, prompt)
        if made.shape == expected.shape and prompt != "a star":
            assert (made - expected).norm() < 0.02 * expected.norm()
    assert effect.evidence()["cuda_graphs_recorded"] == 1
    assert effect.evidence()["cuda_graph_replays"] >= 3
