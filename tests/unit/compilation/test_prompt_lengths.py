"""Graphs of language models for a few lengths of prompts, with a capture that runs on a CPU."""

from typing import Any

import pytest
import torch

from tests import flow_models
from tests.targets import target_of
from tests.unit.techniques.test_cuda_graph import GPU, capture
from vivace.machinery.compilation.prompt_lengths import (
    PromptLengths,
    is_causal_language_model,
)
from vivace.techniques.cuda_graph import CudaGraph

PROMPTS = ["a star", "a red star", "words " * 9, "words " * 40, "words " * 41, ["a star", "words " * 30]]
OWN_LENGTH = ["qwen-image", "qwen-image-2.1", "cogview4-6b"]
"""Models whose pipelines give the text encoder each prompt at its own length."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)


def with_graphs(pipe: Any) -> Any:
    return CudaGraph(targets=("text_encoder",)).apply(target_of(machine=GPU, pipe=pipe))


def embedded(pipe: Any, prompt: str | list[str], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        embeddings = pipe.encode_prompt(prompt if isinstance(prompt, str) else list(prompt), **more)[0]
    return torch.cat(embeddings) if isinstance(embeddings, list) else embeddings


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("model", OWN_LENGTH)
def test_embeddings_are_those_of_prompts_at_their_own_length(
    model: str, dtype: torch.dtype, rounding: float
) -> None:
    pipe = flow_models.pipeline(model)
    pipe.text_encoder.to(dtype)
    expected = [embedded(pipe, prompt) for prompt in PROMPTS]
    effect = with_graphs(pipe)
    for _ in range(2):
        for prompt, plain in zip(PROMPTS, expected, strict=True):
            made = embedded(pipe, prompt)
            assert made.shape == plain.shape
            assert (made - plain).float().norm() <= rounding * plain.float().norm()
    evidence = effect.evidence()
    assert evidence["cuda_graphs_recorded"] <= 4 < len(PROMPTS)
    assert evidence["text_encoder.prompts_padded"] > 0
    assert effect.refuted({}) is None


@pytest.mark.parametrize("model", ["z-image-turbo", "flux2-klein-4b", "krea-2-turbo", "sana-1600m"])
@pytest.mark.quick("z-image-turbo", "sana-1600m")
def test_prompts_that_a_pipeline_pads_are_captured_as_they_are(model: str) -> None:
    pipe = flow_models.pipeline(model)
    prompts = PROMPTS[:3]
    expected = [embedded(pipe, prompt) for prompt in prompts]
    effect = with_graphs(pipe)
    for prompt, plain in zip(prompts, expected, strict=True):
        assert torch.equal(embedded(pipe, prompt), plain)
    assert effect.evidence()["cuda_graphs_recorded"] == 1
    assert "text_encoder.prompts_padded" not in effect.evidence()


def test_padding_on_the_left_stays_where_it_is() -> None:
    """As Qwen-Image 2.1 pads a batch; positions count it."""
    encoder = flow_models.pipeline("qwen-image-2.1").text_encoder
    ids = torch.randint(1, 900, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    lengths = PromptLengths(encoder.forward, torch.device("cpu"), capture, 1)
    call = {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
    with torch.no_grad():
        expected, made = encoder(**call), lengths(**call)
    for plain, state in zip(expected.hidden_states, made.hidden_states, strict=True):
        real = mask.bool()
        assert state.shape == plain.shape
        torch.testing.assert_close(state[real], plain[real], rtol=1e-5, atol=1e-6)
    assert made.past_key_values is None
    assert lengths.num_padded == lengths.graphs.num_captured == 1


def test_without_padding_attention_is_given_no_mask() -> None:
    """A mask would choose slower kernels, and round otherwise."""
    masks: list[Any] = []

    def forward(*, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        masks.append(attention_mask)
        return input_ids.float()[..., None]

    lengths = PromptLengths(forward, torch.device("cpu"), capture, 4)
    ids = torch.arange(1, 41)[None]
    for mask in (torch.ones_like(ids), torch.ones_like(ids).bool()):
        assert torch.equal(lengths(ids, attention_mask=mask)[0, :, 0], ids[0].float())
    assert set(masks) == {None}
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    lengths(ids, mask)
    assert masks[-1].tolist() == [[0] * 3 + [1] * 37 + [0] * 24]


def test_calls_with_images_are_not_captured() -> None:
    plain = flow_models.draw(flow_models.session("qwen-image-edit-2511"))
    session = flow_models.session("qwen-image-edit-2511")
    effect = with_graphs(session.pipe)
    assert (flow_models.draw(session) == plain).all()
    assert effect.evidence() == {
        "cuda_graphs_recorded": 0,
        "cuda_graph_replays": 0,
        "text_encoder.calls_not_captured": 2,
    }
    assert "was given images with every prompt" in str(effect.refuted({}))
    assert is_causal_language_model(session.pipe.text_encoder)


def test_text_is_written_without_graphs() -> None:
    """Each word is a call with one more token in a cache."""
    pipe = flow_models.pipeline("flux2-klein-4b")
    ids = torch.arange(1, 12)[None]
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = pipe.text_encoder.generate(ids, **settings)
    effect = with_graphs(pipe)
    assert torch.equal(pipe.text_encoder.generate(ids, **settings), plain)
    assert plain.shape[1] == ids.shape[1] + 3
    assert effect.evidence()["text_encoder.calls_not_captured"] == 3


def test_other_text_encoders_are_not_padded() -> None:
    """In T5 tokens see later ones."""
    pipe = flow_models.pipeline("sd35-medium")
    assert not is_causal_language_model(pipe.text_encoder_3)
    assert not is_causal_language_model(pipe.text_encoder)
    assert not is_causal_language_model(pipe.vae)
