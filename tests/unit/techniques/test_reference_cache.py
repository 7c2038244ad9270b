"""Keys and values of source images, kept from an edit's first step."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests import flow_models
from tests.families import build, psnr
from tests.narrow import SIDE
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph
from vivace import apply
from vivace.errors import RecipeError, Unsupported
from vivace.recipes.resolve import resolve

MODELS = ("flux-kontext", "flux2-klein-4b", "flux2-dev", "qwen-image-edit-2509", "qwen-image-edit-2511")
KLEIN, EDIT = "flux2-klein-4b", "qwen-image-edit-2511"
TOKENS = (SIDE // 16) ** 2
"""Of an image of SIDE pixels."""


def image(index: int = 1, width: int = SIDE, height: int = SIDE) -> Any:
    return flow_models.source(index).resize((width, height))


def several(model: str) -> dict[str, Any]:
    """Return a call's images: of Qwen's a wide one, which moves the text's positions, and where it can be two."""
    first = image(1, 2 * SIDE, SIDE // 2)
    return {"image": first if model == "flux-kontext" else [first, image(2)], "height": SIDE, "width": SIDE}


@contextmanager
def first_step_s_keys(pipe: Any, num_calls: int, num_own: int) -> Iterator[None]:
    """Compute all tokens in each step, and force keys and values of those behind the image's to be the first step's.

    Args:
        num_calls: of the denoiser in a step.
        num_own: tokens of the image.
    """
    module: Any = sys.modules[type(pipe.transformer).__module__]
    attend, first, places, numbers = module.dispatch_attention_fn, list[Any](), list[int](), itertools.count()
    attentions = [part for part in pipe.transformer.modules() if hasattr(type(part), "set_processor")]
    in_step = num_calls * len(attentions)

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        places.append(kwargs["hidden_states"].shape[1] - num_own)

    def forced(query: Any, key: Any, value: Any, **how: Any) -> Any:
        number = places[-1]
        if len(first) < in_step:
            first.append((key[:, -number:].clone(), value[:, -number:].clone()))
        else:
            key[:, -number:], value[:, -number:] = first[next(numbers) % in_step]
        return attend(query, key, value, **how)

    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    with mock.patch.object(module, "dispatch_attention_fn", forced):
        yield
    handle.remove()


GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


@pytest.mark.parametrize(("model", "more"), [*((model, {}) for model in MODELS), ("flux-kontext", GUIDED)])
def test_later_steps_attend_to_the_first_step_s_keys_and_values(model: str, more: dict[str, Any]) -> None:
    """Guidance in two calls has keys and values for each."""
    call = several(model) | more
    plain = flow_models.session(model)
    with first_step_s_keys(plain.pipe, 2 if more or model.startswith("qwen") else 1, TOKENS):
        expected = flow_models.latents(plain, **call)
    usual = flow_models.latents(flow_models.session(model), **call)
    session = flow_models.session(model, "reference_cache")
    made = flow_models.latents(session, **call)
    assert psnr(made, expected) > 90
    assert psnr(usual, expected) < 60
    assert np.array_equal(flow_models.latents(session, **call), made), "each image begins anew"
    other = call | {"image": image(3)}
    fresh = flow_models.latents(flow_models.session(model, "reference_cache"), **other)
    assert np.array_equal(flow_models.latents(session, **other), fresh)


@pytest.mark.parametrize("model", MODELS)
def test_computed_in_each_step_the_image_is_the_same(model: str) -> None:
    call = several(model)
    session = flow_models.session(model, "reference_cache(1)")
    expected = flow_models.latents(flow_models.session(model), **call)
    assert np.array_equal(flow_models.latents(session, **call), expected)
    assert "never hit" in str(session.refuted({}))


@pytest.mark.parametrize(("recipe", "whole"), [("", [0]), ("(2)", [0, 2]), ("(hits=0.5)", [0, 1, 3])])
def test_later_steps_compute_the_image_s_tokens_alone(recipe: str, whole: list[int]) -> None:
    session = flow_models.session(KLEIN, f"reference_cache{recipe}")
    tokens: list[int] = []
    session.pipe.transformer.x_embedder.register_forward_pre_hook(
        lambda _, args: tokens.append(args[0].shape[1])
    )
    flow_models.latents(session, image=[image(1), image(2, SIDE // 2)])
    most = TOKENS + TOKENS + TOKENS // 2
    assert tokens == [most if step in whole else TOKENS for step in range(flow_models.STEPS)]
    evidence = session.evidence()
    assert evidence["cache_hit_rate"] == 1 - len(whole) / flow_models.STEPS
    assert evidence["denoiser.source_tokens"] == most - TOKENS


def test_a_batch_has_keys_and_values_for_each_row() -> None:
    prompts = [flow_models.PROMPT, "a yellow star"]
    call: dict[str, Any] = {"image": [image(1)]}
    both = flow_models.latents(flow_models.session(KLEIN, "reference_cache"), prompts, **call)
    alone = flow_models.latents(flow_models.session(KLEIN, "reference_cache"), prompts[0], **call)
    assert psnr(both[:1], alone) > 60


def test_without_a_source_image_nothing_changes_and_it_says_so() -> None:
    session = flow_models.session(KLEIN, "reference_cache")
    assert np.array_equal(flow_models.latents(session), flow_models.latents(flow_models.session(KLEIN)))
    assert "no call had a source image" in str(session.refuted(session.evidence()))

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        flow_models.latents(session, image=image(2), callback_on_step_end=fail)
    assert np.array_equal(flow_models.latents(session), flow_models.latents(flow_models.session(KLEIN)))
    edited = flow_models.latents(session, image=image(1))
    assert session.refuted(session.evidence()) is None
    again = flow_models.session(KLEIN, "reference_cache")
    assert np.array_equal(flow_models.latents(again, image=image(1)), edited)


def test_pipelines_without_source_images_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"FluxPipeline gives its denoiser no source images .* FluxKontext"):
        apply(build("flux"), "reference_cache")
    for other in ("teacache(hits=0.5)", "parallel(ulysses)"):
        with pytest.raises(RecipeError, match=r"step cache|own part of the tokens"):
            resolve(f"reference_cache+{other}")


@pytest.mark.parametrize("model", [KLEIN, EDIT])
def test_captured(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is not; another size, another text and a call without a source have graphs of their own."""
    alone, session = (flow_models.session(model, "fused(bf16)+reference_cache") for _ in range(2))
    effect = apply_cuda_graph(session.pipe, monkeypatch)
    assert effect.evidence is not None
    calls = [several(model), {"image": image(2)}, several(model), *([{}] if model == KLEIN else [])]
    for call in calls:
        assert psnr(flow_models.latents(session, **call), flow_models.latents(alone, **call)) > 90
    evidence, num_texts = effect.evidence(), 2 if model == EDIT else 1
    assert evidence["cuda_graphs_recorded"] == 2 * num_texts + (model == KLEIN)
    whole = flow_models.STEPS if model == KLEIN else 0
    assert evidence["cuda_graph_replays"] == 3 * num_texts * (flow_models.STEPS - 1) + whole


@pytest.mark.parametrize("blocks", ["whole", "repeated"])
@pytest.mark.parametrize("model", [KLEIN, EDIT])
@pytest.mark.long
def test_compiled_it_has_no_break(model: str, blocks: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = several(model)
    alone = flow_models.latents(flow_models.session(model, "reference_cache"), **call)
    made = flow_models.session(model, f"reference_cache+compile(blocks={blocks}, backend=eager)")
    for _ in range(2):
        assert psnr(flow_models.latents(made, **call), alone) > 60
        assert made.evidence()["graph_breaks"] == 0
