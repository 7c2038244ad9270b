"""Dual block cache: the first blocks decide, the middle ones are reused, the last correct; masks of steps."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from benchmarks.flops import count_denoiser
from tests import flow_models
from tests.families import build, draw, drawn, psnr, session
from tests.unit.families.test_families import one_call, tensor
from vivace.errors import RecipeError, Unsupported
from vivace.foundation.spec.recipe_syntax import RecipeSpec
from vivace.machinery.step_caching.block_residual import blocks_of
from vivace.machinery.step_caching.engine import relative_change
from vivace.machinery.step_caching.split_blocks import num_blocks, split_forwards
from vivace.machinery.step_caching.when import steps_of
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques.dual_block_cache import DualBlockCache

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")

CALL = {"num_inference_steps": 12}


def the_one(recipe: str) -> DualBlockCache:
    (technique,) = resolve(recipe)
    assert isinstance(technique, DualBlockCache)
    return technique


def flux_call() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return tiny-flux's transformer, and the arguments of the second step's call."""
    made = session("flux")
    transformer = made.pipe.transformer
    calls: list[Any] = []
    hook = transformer.register_forward_pre_hook(lambda _, a, k: calls.append((a, dict(k))), with_kwargs=True)
    draw(made, num_inference_steps=2)
    hook.remove()
    return transformer, *calls[1]


# The blocks


def disagreements(transformer: Any, args: Any, kwargs: Any, first: int, last: int) -> list[str]:
    """Return the ways through the blocks that compute something else where what is reused is the step's own."""
    kwargs = kwargs | {"return_dict": False}
    forwards = split_forwards(transformer, first, last)
    assert forwards.look is not None
    assert forwards.compute_on is not None
    assert forwards.reuse_on is not None
    with torch.no_grad():
        plain = tensor(transformer(*args, **kwargs)[0])
        output, kept = forwards.compute(*args, **kwargs)
        looked = forwards.look(*args, **kwargs)
        again, kept_again = forwards.compute_on(looked, *args, **kwargs)
        nothing = tuple(torch.zeros_like(residual) for residual in kept)
        without = tensor(forwards.reuse(nothing, *args, **kwargs))
        holds = {
            "compute": torch.equal(tensor(output), plain),
            "compute_on": torch.equal(tensor(again), plain),
            "what both keep": len(kept) == len(kept_again) and all(map(torch.equal, kept, kept_again)),
            "reuse": torch.allclose(tensor(forwards.reuse(kept, *args, **kwargs)), plain, atol=1e-5),
            "reuse_on": torch.allclose(
                tensor(forwards.reuse_on(looked, kept, *args, **kwargs)), plain, atol=1e-5
            ),
            "the middle blocks add something": not torch.allclose(without, plain, atol=1e-3),
        }
    return [f"{first}, {last}: {way}" for way, is_right in holds.items() if not is_right]


@pytest.mark.parametrize("model", [name for name in flow_models.MODELS if name != "qwen-image-2.1"])
@pytest.mark.long
def test_every_family_s_blocks_can_be_split(model: str) -> None:
    """Qwen-Image 2.1's first call has the text as well, and is never reused: see the contracts of its pipeline."""
    transformer, args, kwargs = one_call(model)
    num = num_blocks(transformer)
    for first in range(1, num):
        for last in range(num - first):
            assert disagreements(transformer, args, kwargs, first, last) == []


def test_flux_s_blocks_can_be_split_anywhere() -> None:
    transformer, args, kwargs = flux_call()
    assert num_blocks(transformer) == 7
    for first, last in (
        (1, 0),
        (1, 1),
        (1, 5),
        (2, 2),
        (3, 3),
        (6, 0),
    ):  # two double blocks, then single ones
        assert disagreements(transformer, args, kwargs, first, last) == []


def test_where_later_blocks_have_text_and_image_in_one() -> None:
    transformer, args, kwargs = one_call("flux2-klein-4b")
    assert blocks_of(transformer).joined == ("single_transformer_blocks",)
    for first, last in ((1, 0), (1, 1), (2, 0)):
        assert disagreements(transformer, args, kwargs, first, last) == []


@pytest.mark.long
def test_what_a_controlnet_adds_is_added_where_it_was() -> None:
    transformer, args, kwargs = flux_call()
    image = transformer.x_embedder(kwargs["hidden_states"])
    kwargs["controlnet_block_samples"] = [0.3 * torch.randn_like(image) for _ in range(2)]
    kwargs["controlnet_single_block_samples"] = [0.3 * torch.randn_like(image) for _ in range(3)]
    for first, last in ((1, 0), (1, 3), (3, 1)):
        assert disagreements(transformer, args, kwargs, first, last) == []


def test_a_hit_computes_the_first_and_the_last_blocks_alone() -> None:
    size = {"height": 128, "width": 128, "text_length": 32}
    alone = count_denoiser(build("flux").transformer, **size).total
    pipe = build("flux")
    ran: list[int] = []
    transformer = pipe.transformer
    for number, block in enumerate([*transformer.transformer_blocks, *transformer.single_transformer_blocks]):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    vivace.apply(pipe, "dual_block_cache(hits=0.99, first=1, last=2)")
    whole, again, hit = (count_denoiser(transformer, **size).total for _ in range(3))
    assert whole == again == alone, "with a fixed schedule nothing is computed for the cache's own sake"
    assert ran == [*range(7), *range(7), 0, 5, 6]
    assert hit < 0.6 * alone


def test_looking_computes_no_block_twice() -> None:
    made = session("flux", "dual_block_cache(0.2, first=2, last=1)")
    transformer = made.pipe.transformer
    ran: list[int] = []
    for number, block in enumerate([*transformer.transformer_blocks, *transformer.single_transformer_blocks]):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    draw(made, **CALL)
    computed, hits = ran.count(3), 12 - ran.count(3)
    assert hits == round(made.evidence()["cache_hit_rate"] * 12) > 2
    assert ran.count(0) == ran.count(1) == ran.count(6) == 12
    assert len(ran) == 7 * computed + 3 * hits


# The decision


@pytest.mark.parametrize(
    ("knobs", "limits"),
    [
        ("0.3", {}),
        ("0.3, first=2, warmup=1", {"warmup": 1}),
        ("0.5, max_consecutive=2", {"in_a_row": 2}),
        ("0.5, max_cached=3", {"in_all": 3}),
    ],
)
@pytest.mark.quick("0.3-*", "*max_cached*")
def test_it_decides_by_what_the_first_blocks_add(knobs: str, limits: dict[str, int]) -> None:
    """Against a plain reckoning over what they really added."""
    technique = the_one(f"dual_block_cache({knobs})")
    made = session("flux", technique.text)
    transformer = made.pipe.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    first = technique.first or 1
    begin: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    computed: list[int] = []
    blocks[0].register_forward_pre_hook(
        lambda _, __, kwargs: begin.append(kwargs["hidden_states"]), with_kwargs=True
    )
    blocks[first - 1].register_forward_hook(lambda _, __, out: added.append(out[1] - begin[-1]))
    blocks[-1].register_forward_hook(lambda *_: computed.append(len(added) - 1))
    draw(made, **CALL)
    expected, in_all, in_a_row, last = [], 0, 0, 0
    for step in range(12):
        close = step >= limits.get("warmup", 3) and (
            relative_change(added[step], added[last]) < technique.threshold
        )
        if close and in_all < limits.get("in_all", 99) and in_a_row < limits.get("in_a_row", 99):
            in_all, in_a_row = in_all + 1, in_a_row + 1
        else:
            expected.append(step)
            last, in_a_row = step, 0
    assert computed == expected
    assert 2 < len(expected) < 11
    assert made.evidence() == {"cache_hit_rate": pytest.approx(1 - len(expected) / 12), "cache_calls": 12}


def test_with_one_first_block_it_is_the_first_block_cache() -> None:
    assert np.array_equal(
        drawn("flux", "dual_block_cache(hits=0.5)", **CALL),
        drawn("flux", "first_block_cache(hits=0.5)", **CALL),
    )


# Masks


@pytest.mark.parametrize(
    ("text", "stored", "steps"),
    [
        ("mask=4c2h", "mask=4c2h", "cccchh"),
        ("mask=cC2cdh", "mask=4c1d1h", "ccccdh"),
        ("mask=' 1c3D '", "mask=1c3d", "cddd"),
    ],
)
def test_a_mask_is_stored_in_one_form(text: str, stored: str, steps: str) -> None:
    recipe = resolve(f"dual_block_cache({text})")
    assert recipe.text == f"dual_block_cache({stored})"
    assert resolve(recipe.text) == recipe
    again = Recipe.from_spec(RecipeSpec.model_validate_json(recipe.spec.model_dump_json()))
    assert again == recipe
    assert steps_of(stored.removeprefix("mask=")) == steps


@pytest.mark.parametrize(
    ("mask", "hits"),
    [
        ("1c1h", list(range(1, 12))),
        ("4c2h1c", [4, 5, 7, 8, 10, 11]),
        ("4c2h1c3h9c", [4, 5, 7, 8, 9]),
        ("2c", []),
        ("30c", []),
    ],
)
@pytest.mark.quick("4c2h1c-*", "2c-*")
def test_a_mask_says_which_steps_are_hits(mask: str, hits: list[int]) -> None:
    made = session("flux", f"dual_block_cache(mask={mask})")
    computed: list[int] = []
    made.pipe.transformer.single_transformer_blocks[0].register_forward_hook(lambda *_: computed.append(1))
    num_computed: list[int] = []
    draw(made, **CALL, callback_on_step_end=lambda *_: num_computed.append(len(computed)) or {})
    hit_steps = [step for step in range(12) if num_computed[step] == (num_computed[step - 1] if step else 0)]
    assert hit_steps == hits
    assert made.effects["dual_block_cache@denoiser"]["denoiser.dual_block_cache"] == f"mask={mask}"
    assert (made.refuted({}) is None) == bool(hits)


def test_steps_of_a_mask_may_be_decided() -> None:
    made = session("flux", "dual_block_cache(10, mask=3c4d1c4d, max_consecutive=3)")
    draw(made, **CALL)
    assert made.evidence()["cache_hit_rate"] == pytest.approx(6 / 12), "3, 4, 5; 8, 9, 10"


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ("mask=4c2x", "is not a mask of steps; write runs of c"),
        ("mask=''", "is not a mask of steps"),
        ("mask=0c2h", "is not a mask of steps"),
        ("mask=c5000h", "more than 1000 steps"),
        ("mask=2h4c", "the first step has nothing to reuse; begin the mask with c, such as 1c2h4c"),
        ("mask=4c2d, warmup=5", "leaves nothing to warmup"),
        ("0.3, mask=4c2h", "the mask 4c2h leaves nothing to threshold; leave threshold out"),
        ("mask=4c2h, max_cached=3", "leaves nothing to max_cached"),
        ("mask=4c2h, hits=0.5", r"give a threshold \(with its limits\) and mask or hits, not both"),
    ],
)
def test_what_a_mask_cannot_be(knobs: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        resolve(f"dual_block_cache({knobs})")


# As other step caches


def test_guidance_in_one_call() -> None:
    cached = flow_models.session("sd35-medium", "dual_block_cache(hits=0.5)+cfg_cutoff(0.5)")
    assert np.isfinite(flow_models.draw(cached)).all()
    evidence = cached.evidence()
    assert evidence["cache_calls"] == 4
    assert evidence["unguided_steps"] == 2
    assert evidence["cache_hit_rate"] == 0.0


# Two sessions in one process


def shallow(recipe: str) -> Any:
    """A session of tiny-flux with three of its seven blocks: compiled, they take a third of the time."""
    pipe = build("flux")
    for chain, num in (("transformer_blocks", 1), ("single_transformer_blocks", 2)):
        setattr(pipe.transformer, chain, getattr(pipe.transformer, chain)[:num])
    return vivace.apply(pipe, recipe)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("first_block_cache(hits=0.5)", "dual_block_cache(0.3, last=1)"),
        ("dual_block_cache(hits=0.5)", "dual_block_cache(hits=0.5, last=1)"),
        ("teacache(hits=0.5)", "dual_block_cache(0.3)"),
        ("baseline", "first_block_cache(hits=0.5)"),
    ],
)
@pytest.mark.long
@pytest.mark.exhaustive("dual_block*", "teacache*")
def test_two_compiled_sessions_each_have_their_own_cache(first: str, other: str) -> None:
    """Compiled code may be used again for another module of the same classes."""
    recipes = first, other
    alone = [draw(shallow(recipe), **CALL) for recipe in recipes]
    compiled = "compile(backend=eager)"
    made = [shallow(compiled if recipe == "baseline" else f"{recipe}+{compiled}") for recipe in recipes]
    for _ in range(2):
        for opened, expected in zip(made, alone, strict=True):
            assert psnr(draw(opened, **CALL), expected) > 60
    for opened, recipe in zip(made, recipes, strict=True):
        if recipe != "baseline":
            assert 0.2 < opened.evidence()["cache_hit_rate"] < 0.8
            assert opened.evidence()["cache_calls"] == 24


def test_a_forward_that_was_replaced() -> None:
    wrapped = build("flux")
    wrapped.transformer.forward = wrapped.transformer.forward
    with pytest.raises(Unsupported, match="its forward has been replaced"):
        vivace.apply(wrapped, "dual_block_cache")
