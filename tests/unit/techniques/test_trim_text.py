"""What nothing reads of a text encoder is left out: prompt embeddings keep their bits."""

from typing import Any

import numpy as np
import pytest
import torch

from tests import flow_models
from tests.targets import target_of
from tests.unit.techniques.test_cuda_graph import capture
from vivace.errors import Unsupported
from vivace.techniques import cuda_graph
from vivace.techniques.trim_text import TrimText

LAYERS = {
    "flux2-klein-4b": (36, 27),
    "flux2-dev": (40, 30),
    "qwen-image": (1, 1),
    "qwen-image-2.1": (1, 1),
    "qwen-image-edit-2511": (1, 1),
}


def embeddings(session: Any) -> list[torch.Tensor]:
    """Return what a pipeline makes of a prompt, and of one that is cut off."""
    pipe = session.pipe
    more = {"image": [flow_models.source()]} if "Edit" in type(pipe).__name__ else {}
    with torch.no_grad():
        return [pipe.encode_prompt(text, **more)[0] for text in (flow_models.PROMPT, "words " * 600)]


def num_layers(encoder: Any) -> int:
    model = next(part for part in encoder.modules() if hasattr(part, "embed_tokens"))
    return len(model.layers)


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.quick("flux2-klein*", "qwen-image-2.1")
def test_prompt_embeddings_have_the_same_bits(model: str) -> None:
    plain, trimmed = (flow_models.session(model, recipe) for recipe in ("baseline", "trim_text"))
    before, after = LAYERS[model]
    assert (num_layers(plain.pipe.text_encoder), num_layers(trimmed.pipe.text_encoder)) == (before, after)
    for expected, made in zip(embeddings(plain), embeddings(trimmed), strict=True):
        assert torch.equal(made, expected)
    facts = trimmed.effects["trim_text@text_encoder"]
    assert facts["text_encoder.layers_left_out"] == before - after
    weights = [sum(p.numel() for p in of.pipe.text_encoder.parameters()) for of in (plain, trimmed)]
    assert weights[1] < weights[0]


def test_an_image_has_the_same_bits_with_other_techniques() -> None:
    expected, made = (
        flow_models.draw(flow_models.session("flux2-klein-4b", recipe))
        for recipe in ("fused(bf16)+prompt_cache", "trim_text+fused(bf16)+prompt_cache")
    )
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("model", ["flux2-klein-4b", "qwen-image"])
def test_a_saved_model_is_built_again_without_what_was_left_out(model: str) -> None:
    trimmed = flow_models.session(model, "trim_text")
    read = target_of(pipe=flow_models.pipeline(model))
    TrimText().rebuild(read, trimmed.effects["trim_text@text_encoder"])
    encoder = read.pipe.text_encoder
    encoder.load_state_dict(trimmed.pipe.text_encoder.state_dict(), strict=True)
    assert num_layers(encoder) == LAYERS[model][1]
    TrimText().resume(read)
    if LAYERS[model][1] > 1:
        with pytest.raises(Unsupported, match="those up to 27 are there"):
            read.pipe.encode_prompt("a star", text_encoder_out_layers=(9, 28))


def test_what_needs_more_of_the_text_encoder_is_refused() -> None:
    pipe = flow_models.session("flux2-klein-4b", "trim_text").pipe
    assert pipe.encode_prompt("a star", text_encoder_out_layers=(3, 27))[0].shape[-1]
    for layers in ((9, 28), (9, -1)):
        with pytest.raises(Unsupported, match="reads layers that were left out; those up to 27 are there"):
            pipe.encode_prompt("a star", text_encoder_out_layers=layers)
    with pytest.raises(Unsupported, match="no layers left to write text with"):
        flow_models.draw(flow_models.session("flux2-dev", "trim_text"), caption_upsample_temperature=0.15)


def test_padding_that_nothing_reads_is_left_out() -> None:
    """Z-Image pads prompts to 512 tokens, and reads their own."""
    plain, trimmed = (flow_models.session("z-image-turbo", recipe) for recipe in ("bf16", "bf16+trim_text"))
    lengths: list[int] = []
    trimmed.pipe.text_encoder.layers[0].register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    for prompt in ("a star", "words " * 60, "words " * 600, ["a star", "words " * 20]):
        with torch.no_grad():
            expected, made = (
                of.pipe.encode_prompt(list(prompt) if isinstance(prompt, list) else prompt)[0]
                for of in (plain, trimmed)
            )
        for own, states in zip(expected, made, strict=True):
            assert states.shape == own.shape
            assert (states - own).float().norm() < 0.005 * own.float().norm()
    assert max(lengths) == 512
    assert lengths[0] == len(plain.pipe.encode_prompt("a star")[0][0])
    evidence = trimmed.evidence()
    assert 0 < evidence["text_encoder.tokens_left_out"] < evidence["text_encoder.tokens"]
    assert TrimText().apply(target_of(pipe=plain.pipe)).refuted({}) is None, "nothing was drawn"
    assert trimmed.effects["trim_text@text_encoder"] == {"text_encoder.padding": "left out"}


def test_graphs_are_of_what_is_left_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    monkeypatch.setattr(cuda_graph.CudaGraph, "unsupported", lambda *_: None)
    expected = flow_models.draw(flow_models.session("z-image-turbo"))
    session = flow_models.session("z-image-turbo", "trim_text+cuda_graph@text_encoder")
    for prompt in (flow_models.PROMPT, "words", "words " * 30, "words " * 31, flow_models.PROMPT):
        image = flow_models.draw(session, prompt)
    assert np.abs(image - expected).max() < 0.02
    assert session.evidence()["cuda_graphs_recorded"] == 2
    assert session.evidence()["text_encoder.prompts_padded"] == 5


def test_a_saved_model_leaves_out_padding_again() -> None:
    read = target_of(pipe=flow_models.pipeline("z-image-turbo"))
    TrimText().rebuild(read, {"text_encoder.padding": "left out"})
    TrimText().resume(read)
    lengths: list[int] = []
    read.pipe.text_encoder.layers[0].register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    read.pipe.encode_prompt("a star")
    assert lengths[0] < 512


def test_other_pipelines_are_refused() -> None:
    with pytest.raises(Unsupported, match="not known which layers"):
        flow_models.session("sd35-medium", "trim_text")
