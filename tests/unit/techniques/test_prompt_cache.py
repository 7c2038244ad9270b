"""Prompts that were encoded before: the same images bit for bit, whatever the encoder call depends on."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, drawn, latents, session
from tests.targets import target_of
from vivace.benchmark import Timing
from vivace.benchmark.rounds.round import measure_round
from vivace.errors import NoEffect, Unsupported
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.trial import Trial
from vivace.machinery.technique import Machine, component_of
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.workloads import checked_request
from vivace.techniques.prompt_cache import PromptCache

GPU = Machine("cuda", "a GPU", (9, 0), None)


def counts(session: Any) -> tuple[int, int, int]:
    evidence = session.evidence()
    return tuple(evidence[f"prompt_cache_{name}"] for name in ("hits", "misses", "passed_through"))


BRIEF: dict[str, Any] = {"num_inference_steps": 1}
"""Of calls that differ in their texts."""


def count_encodings(pipe: Any) -> list[str]:
    encodings: list[str] = []
    for name in ("text_encoder", "text_encoder_2"):
        encoder = component_of(pipe, name)
        if encoder is not None:
            encoder.register_forward_hook(lambda *_, name=name: encodings.append(name))
    return encodings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow("sdxl")
def test_the_same_pictures_bit_for_bit_and_no_encoder_runs_twice(family: str) -> None:
    plain, kept = session(family), session(family, "prompt_cache")
    encodings = count_encodings(kept.pipe)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ("a red circle", BRIEF),
        ("a blue square", BRIEF | {"seed": 3}),
        (["a red circle", "a star"], BRIEF),
    ]
    references = [latents(plain, prompt, **call) for prompt, call in calls]
    encoded: list[int] = []
    for _ in range(2):
        for (prompt, call), reference in zip(calls, references, strict=True):
            assert np.array_equal(latents(kept, prompt, **call), reference)
        encoded.append(len(encodings))
    assert encoded[0] > 0
    assert encoded[1] == encoded[0], "the second time nothing was encoded"
    assert counts(kept) == (3, 3, 0)
    assert kept.refuted({}) is None


# Each changes the embeddings, so each must miss and draw what it draws without the cache.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "sd": [
        {"negative_prompt": "a blue square"},
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 2},
    ],
    "sdxl": [
        {"prompt_2": "a blue square"},
        {"negative_prompt": "a blue square"},
        {"negative_prompt": "a blue square", "negative_prompt_2": "a star"},  # alone it is ignored: zeros
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 2},
        {"clip_skip": 1},
    ],
    "flux": [
        {"prompt_2": "a blue square"},
        {"max_sequence_length": 16},
        {"num_images_per_prompt": 2},
        {"negative_prompt": "a star", "true_cfg_scale": 2.0},
    ],
}


@pytest.mark.parametrize(("family", "change"), [(f, c) for f, changes in CHANGES.items() for c in changes])
@pytest.mark.slow("flux-*")
@pytest.mark.exhaustive("flux-change9", "flux-change10")
@pytest.mark.slow("sdxl-change[4578]")
def test_whatever_the_encoders_depend_on_is_part_of_the_key(family: str, change: dict[str, Any]) -> None:
    plain, kept = session(family), session(family, "prompt_cache")
    latents(kept, **BRIEF)
    misses = counts(kept)[1]
    changed, unchanged = (latents(plain, **BRIEF, **arguments) for arguments in (change, {}))
    assert changed.shape != unchanged.shape or not np.array_equal(changed, unchanged)
    for _ in range(2):
        assert np.array_equal(latents(kept, **BRIEF, **change), changed)
    assert counts(kept)[1] == misses + 1
    assert np.array_equal(latents(kept, **BRIEF), unchanged), "and the first is still what it was"


def test_other_weights_tokens_or_adapters_are_other_encoders() -> None:
    kept = session("sd", "prompt_cache")
    latents(kept)
    kept.pipe.text_encoder.to(torch.bfloat16)
    kept.pipe.unet.to(torch.bfloat16)
    kept.pipe.vae.to(torch.bfloat16)
    latents(kept)
    kept.pipe.tokenizer.add_tokens(["<new>"])
    latents(kept)
    assert counts(kept) == (0, 3, 0)


def _query(pipe: Any) -> torch.nn.Linear:
    return next(m for name, m in pipe.text_encoder.named_modules() if name.endswith(("q_proj", ".q")))


class _Adapted(torch.nn.Module):
    """A layer as PEFT wraps it."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.scaling = {"style": 1.0}
        self.weight = layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * (1 + self.scaling["style"])


def _adapt(pipe: Any) -> None:
    for name, layer in list(pipe.text_encoder.named_modules()):
        if name.endswith("q_proj"):
            parent, _, last = name.rpartition(".")
            setattr(pipe.text_encoder.get_submodule(parent), last, _Adapted(layer))


def _rescale(pipe: Any) -> None:
    next(m for m in pipe.text_encoder.modules() if hasattr(m, "scaling")).scaling["style"] = 0.25


def _load(pipe: Any) -> None:
    pipe.text_encoder.load_state_dict({k: v * 1.5 for k, v in pipe.text_encoder.state_dict().items()})


def _merge_as_peft(pipe: Any) -> None:
    _query(pipe).weight.data += 0.2  # raises no version


def _write_a_row(pipe: Any) -> None:
    words = pipe.tokenizer("a red circle", return_tensors="pt").input_ids
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight[words[0, 1]] += 1


def _write_a_buffer(pipe: Any) -> None:
    next(pipe.text_encoder.buffers()).add_(1).remainder_(4)  # of positions


def _replace(pipe: Any) -> None:
    _query(pipe).weight = torch.nn.Parameter(_query(pipe).weight.detach() * 2, requires_grad=False)


def _cast(pipe: Any) -> None:
    pipe.text_encoder.to(torch.float16)


@pytest.mark.parametrize(
    "change",
    [_adapt, _rescale, _load, _merge_as_peft, _write_a_row, _write_a_buffer, _replace, _cast],
)
def test_changed_weights_are_encoded_anew(change: Any) -> None:
    kept = session("sd", "prompt_cache")
    if change is _rescale:
        _adapt(kept.pipe)

    def embedded() -> torch.Tensor:
        return kept.pipe.encode_prompt("a red circle", "cpu", 1, False)[0]

    first = embedded()
    assert torch.equal(embedded(), first)
    assert counts(kept)[:2] == (1, 1)
    change(kept.pipe)
    assert not torch.equal(embedded().float(), first)
    assert counts(kept)[:2] == (1, 2)


def test_offloaded_encoders_are_the_same_from_call_to_call() -> None:
    accelerate = pytest.importorskip("accelerate")
    pipe = build("sd")
    for part in (pipe.text_encoder, pipe.unet, pipe.vae):
        accelerate.cpu_offload(part, torch.device("cpu"), offload_buffers=bool(part._parameters))
    kept = vivace.apply(pipe, "prompt_cache")
    for _ in range(2):
        latents(kept, "a red circle", **BRIEF)
    assert counts(kept)[:2] == (1, 1)


def test_what_is_kept_cannot_be_changed_by_whoever_got_it() -> None:
    kept = session("sd", "prompt_cache")
    reference = latents(kept)

    def spoil(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["prompt_embeds"].zero_()
        return {}

    latents(kept, callback_on_step_end=spoil, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    for embeddings in kept.pipe.encode_prompt("a red circle", kept.pipe.device, 1, True):
        embeddings.zero_()
    assert np.array_equal(latents(kept), reference)


def test_only_the_latest_used_are_kept() -> None:
    kept = session("sd", "prompt_cache(2)")
    for prompt in ("one", "two", "one", "three", "one", "two"):
        latents(kept, prompt, num_inference_steps=1)
    assert counts(kept) == (2, 4, 0), "two was forgotten for three, one was not"


def test_embeddings_of_the_caller_pass_through() -> None:
    kept = session("sd", "prompt_cache")
    with torch.no_grad():
        words, nothing = kept.pipe.encode_prompt("a red circle", kept.pipe.device, 1, True)
    embeddings = {"prompt_embeds": words, "negative_prompt_embeds": nothing}
    picture = latents(kept, None, **embeddings)
    assert np.array_equal(picture, drawn("sd", output_type="latent"))
    assert counts(kept) == (0, 1, 1)
    own = session("sd", "prompt_cache")
    latents(own, None, **embeddings)
    assert "were given embeddings" in (own.refuted({}) or "")


def test_prompts_that_never_repeat_refute_it() -> None:
    kept = session("sd", "prompt_cache")
    latents(kept, "one", num_inference_steps=1)
    assert kept.refuted({}) is None, "one call cannot repeat anything"
    latents(kept, "two", num_inference_steps=1)
    assert kept.refuted({}) == (
        "prompt_cache: none of 2 calls repeated a prompt; if yours do, benchmark with --text repeated"
    )


def test_a_prompt_counts_as_new_after_it_is_forgotten() -> None:
    kept = session("sd", "prompt_cache")
    reference = latents(kept)
    kept.forget_prompts()
    assert np.array_equal(latents(kept), reference)
    assert counts(kept) == (0, 2, 0)


@pytest.mark.parametrize(
    ("text", "outcome", "hits"), [("prompts", Outcome.NO_EFFECT, 0), ("repeated", Outcome.MEASURED, 2)]
)
@pytest.mark.quick("repeated*")
def test_a_round_repeats_its_prompts_only_if_the_workload_says_so(
    text: str, outcome: Outcome, hits: int
) -> None:
    request = checked_request("tiny-sd", "prompt_cache", num_inference_steps=1, text=text)
    trial = Trial(
        model=request.located.model, recipe=request.recipe.spec, workload=request.workload, device="cpu"
    )
    timing = Timing(repeats=2, max_warmup=1)
    measured = measure_round(trial, 0, timing, None, lambda event: None)
    assert measured.outcome is outcome, measured.reason
    assert measured.evidence["prompt_cache_hits"] == hits


def test_prompt_cache_refuses_with_a_reason() -> None:
    with pytest.raises(Unsupported, match="in host memory already; leave free_encoders out"):
        vivace.load("tiny-sd", "prompt_cache(free_encoders=True)")
    pipe = build("sd")
    vivace.apply(pipe, "prompt_cache")
    with pytest.raises(NoEffect, match="already caches its prompts"):
        vivace.apply(pipe, "prompt_cache")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow("sdxl")
def test_freed_encoders_come_back_when_they_are_needed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moves themselves, watched: on a CPU they lead nowhere, but who moves when is the same."""
    pipe = build(family)
    moves: list[str] = []
    monkeypatch.setattr(
        "vivace.techniques.prompt_cache._move",
        lambda module, device: moves.append(
            f"{type(module).__name__} {'away' if device == 'cpu' else 'back'}"
        ),
    )
    monkeypatch.setattr("vivace.techniques.prompt_cache.is_moved_by_hooks", lambda module: False)
    effect = PromptCache(free_encoders=True).apply(target_of(machine=GPU, pipe=pipe))
    encoders = [e for n in ("text_encoder", "text_encoder_2") if (e := component_of(pipe, n)) is not None]
    names = [type(encoder).__name__ for encoder in encoders]
    plain = vivace.apply(pipe)
    latents(plain, "one")
    assert moves == [f"{name} away" for name in names]
    latents(plain, "one")
    assert len(moves) == len(names), "a hit needs no encoder"
    latents(plain, "two")
    assert sorted(moves[len(names) :]) == sorted(
        f"{name} {where}" for name in names for where in ("back", "away")
    )
    assert effect.evidence is not None
    assert effect.evidence()["text_encoders_freed"] == 2 * len(names)
    assert effect.changed["freed_text_encoders"] == len(names)


def test_encoders_that_something_else_moves_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build("sd")
    pipe.text_encoder._hf_hook = object()  # as accelerate's offloading marks its modules
    effect = PromptCache(free_encoders=True).apply(target_of(machine=GPU, pipe=pipe))
    with torch.no_grad():
        pipe.encode_prompt("a red circle", pipe.device, 1, True)
    assert effect.refuted is not None
    assert "something else moves them" in (effect.refuted({}) or "")


@pytest.mark.usefixtures("shallow")
@pytest.mark.long
def test_memory_of_freed_encoders_is_predicted() -> None:
    model = find_weightless("flux-dev")
    plain, kept, freed = (
        predict(model, resolve(recipe))
        for recipe in ("baseline", "prompt_cache", "prompt_cache(free_encoders=True)")
    )
    (t5,) = (c for c in plain.components if c.name == "text_encoder_2")
    assert kept.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.001)
    assert plain.stages["denoiser"] - freed.stages["denoiser"] > 0.99 * t5.num_bytes
    assert freed.stages["text encoders"] == plain.stages["text encoders"], "it is there while it works"
    assert freed.model_bytes == plain.model_bytes
