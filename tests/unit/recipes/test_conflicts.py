"""Techniques that do not go together are refused when the recipe is resolved, before a model is loaded."""

import itertools
from typing import Any

import pytest
import torch

import vivace
from tests.families import build
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.technique import Trait
from vivace.machinery.technique.traits import give, traits_of
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

REFUSED = [
    ("cuda_graph+compile(reduce-overhead)", "torch.compile captures CUDA graphs itself"),
    ("cuda_graph+fbcache(hits=0.5)", "reads a value back to the CPU in each step"),
    ("cuda_graph+quantize(q4_0, backend=gguf)", "take q8_0, or add compile"),
    ("offload(model)+cuda_graph", "CUDA graphs read weights at fixed addresses"),
    ("offload(model)+compile(reduce-overhead)", "CUDA graphs read weights at fixed addresses"),
    ("offload(group)+compile", r"take offload\(model\), or compile\(blocks=repeated\)"),
    ("offload(sequential)+compile(blocks=repeated)", "takes compiled components"),
    ("offload(sequential)+int8", r"take offload\(group\)"),
    ("offload(model)+prompt_cache(free_encoders=True)", "offloading frees them as well"),
    ("parallel(ulysses)+offload(model)", "every GPU has its own"),
    ("parallel(ulysses)+layerwise_casting", r"take quantize\(fp8_weight\)"),
    ("parallel(ulysses)+pyramid_attention", "take teacache, magcache, seacache or taylorseer"),
    ("parallel(ulysses)+compile(reduce-overhead)", "take compile in its default mode and cuda_graph"),
    ("parallel(cfg)+fbcache(hits=0.5)", "both branches of guidance"),
    ("parallel(ring)+attention(flash)", "take ulysses"),
    ("lora(a, hot=True)+fuse_qkv", "to_q, to_k and to_v are one layer"),
    ("lora(a, hot=True)+prune", "other numbers than the LoRA's"),
    ("lora(a, hot=True)+layerwise_casting", "in 8 bits too"),
    ("lora(a, hot=True)+offload(group)", r"take offload\(model\)"),
]
COMPATIBLE = [
    "cuda_graph+compile",
    "cuda_graph+teacache(hits=0.5)",
    "cuda_graph+quantize(q4_0, backend=gguf)+compile",
    "offload(model)+compile",
    "offload(group)+compile(blocks=repeated)",
    "offload(group)+compile@vae",
    "offload(sequential)+quantize(nf4, backend=bitsandbytes)",
    "parallel(cfg)+deepcache",
    "parallel(cfg)+compile(reduce-overhead)",
    "parallel(ulysses)+teacache(hits=0.5)+compile+cuda_graph",
    "parallel(ulysses)+quantize(fp8)",
    "lora(a)+lora(b, hot=True)+lora(c, hot=True)",
    "lora(a)+fuse_qkv+prune+layerwise_casting+offload(group)",
    "lora(a, hot=True)+quantize(fp8)+compile+cuda_graph",
    "lora(a, hot=True)+fused(fp8)+offload(model)",
    "lora(a, hot=True)+fused(fp8)+parallel(cfg)+cuda_graph",
]


@pytest.mark.parametrize(("recipe", "why"), REFUSED)
def test_a_conflict_is_refused_with_a_reason_and_a_caret(recipe: str, why: str) -> None:
    for text in (recipe, "+".join(reversed(recipe.split("+")))):
        with pytest.raises(RecipeError, match=rf"does not go with .*: .*{why}") as caught:
            resolve(text)
        later = text.split("+")[1]
        assert caught.value.text[caught.value.start :].startswith(later.partition("(")[0])


@pytest.mark.parametrize("recipe", COMPATIBLE)
def test_what_goes_together_resolves(recipe: str) -> None:
    assert len(resolve(recipe).techniques) == len(recipe.split("+"))


def test_every_rule_can_be_broken() -> None:
    """By some technique with some of the values of its knobs, or by what a user's own pipeline shows."""
    foreign = {Trait.SHARDED, Trait.CACHED, Trait.HOOKED}
    provided: set[Trait] = set(foreign)
    excluded: set[Trait] = set()
    for kind in TECHNIQUES.values():
        for technique in variants(kind):
            provided |= technique.facts.provides
            excluded |= {rule.trait for rule in technique.facts.excludes}
            assert all(len(rule.because) > 20 for rule in technique.facts.excludes)
    assert excluded <= provided


def variants(kind: Any) -> list[Any]:
    values = {name: [*_choices(field), *_worth_trying(name, field)] for name, field in kind.knobs().items()}
    instances = []
    for chosen in itertools.islice(itertools.product(*values.values()), 10_000):
        try:
            instances.append(kind(**dict(zip(values, chosen, strict=True))))
        except ValueError:
            continue  # knobs that do not go together
    return instances


def _worth_trying(name: str, field: Any) -> list[Any]:
    if field.annotation is bool:
        return [field.default, not field.default]
    if field.is_required() and field.annotation is str:
        return [name]
    return list((field.json_schema_extra or {}).get("tune") or [field.default])


def _choices(field: Any) -> list[Any]:
    return [value for value in getattr(field.annotation, "__args__", ()) if isinstance(value, str)]


def test_what_a_pipeline_brings_is_held_to_the_same_rules() -> None:
    pipe = build("flux")
    vivace.apply(pipe, "fbcache(hits=0.5)")
    with pytest.raises(Unsupported, match="cached between steps: only one step cache at a time"):
        vivace.apply(pipe, "teacache(hits=0.5)")
    pipe = build("sd")
    give(pipe.unet, frozenset({Trait.SHARDED}))
    with pytest.raises(Unsupported, match="parallel: the denoiser is sharded over GPUs"):
        vivace.apply(pipe, "parallel(cfg)")


def test_traits_that_other_libraries_leave_are_seen() -> None:
    from diffusers.hooks import apply_layerwise_casting

    pipe = build("flux")
    assert traits_of(pipe.transformer) == frozenset()
    pipe.transformer.transformer_blocks[0].compile(backend="eager")
    assert traits_of(pipe.transformer) == {Trait.COMPILED}
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend="eager")
    assert traits_of(pipe.transformer) == {Trait.COMPILED, Trait.COMPILED_WHOLE}
    pipe.vae.decoder.forward = torch.compile(pipe.vae.decoder.forward, backend="eager")
    assert Trait.COMPILED_WHOLE in traits_of(pipe.vae)
    apply_layerwise_casting(pipe.text_encoder, torch.float8_e4m3fn, torch.float32)
    assert Trait.HOOKED in traits_of(pipe.text_encoder)


def test_a_technique_does_not_go_with_itself() -> None:
    recipe = resolve("inference_mode")
    with pytest.raises(RecipeError, match="keep one"):
        recipe.with_(*recipe)
