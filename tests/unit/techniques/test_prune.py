"""Blocks that change little are taken out."""

from typing import Any

import numpy as np
import pytest

import vivace
from tests.families import build, draw, psnr
from tests.narrow import make_all_small
from tests.targets import target_of
from vivace.errors import Unsupported
from vivace.machinery.technique import component_of
from vivace.measure.accelerator import weights_bytes
from vivace.measure.machine import this_machine
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.session import Session
from vivace.techniques.prune import _blocks

pytestmark = pytest.mark.usefixtures("small_images")

PROMPTS = ["a red circle", "a large green triangle"]


def applied(pipe: Any, recipe: str) -> Any:
    """As a workload of small images in two steps would have it."""
    call: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2}
    if hasattr(pipe, "transformer"):
        call |= {"height": 128, "width": 128, "max_sequence_length": 32}
    target = target_of(machine=this_machine("cpu"), pipe=pipe, defaults=call, prompts=tuple(PROMPTS))
    return Session(pipe, resolve(recipe), target)


def pruned(family: str, recipe: str) -> Any:
    return applied(build(family), recipe)


def names_of(made: Any) -> list[str]:
    return str(made.effects["prune@denoiser"]["denoiser.taken_out"]).split(", ")


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_what_is_taken_out_is_gone(family: str) -> None:
    pipe = build(family)
    before = weights_bytes(pipe)
    num = len(_blocks(component_of(pipe, "denoiser")))
    made = applied(pipe, "prune(0.4, pictures=1)")
    effect = made.effects["prune@denoiser"]
    assert effect["denoiser.blocks_that_could_go"] == num
    assert effect["denoiser.blocks_taken_out"] == len(names_of(made)) == int(0.4 * num)
    assert weights_bytes(pipe) < before
    assert effect["chosen"] == "least influence over 1 image"
    assert np.isfinite(draw(made)).all()


def test_what_adds_nothing_goes_first_and_the_picture_stays() -> None:
    pipe = build("sd")
    reference = draw(vivace.apply(pipe))
    idle = pipe.unet.mid_block.resnets[1]
    idle.conv2.weight.zero_()
    idle.conv2.bias.zero_()
    silent = draw(vivace.apply(pipe))
    assert not np.array_equal(silent, reference)
    made = applied(pipe, "prune(0.01, pictures=1)")
    assert names_of(made) == ["mid_block.resnets.1"]
    assert psnr(draw(made), silent) > 80


def test_a_list_keeps_one_block() -> None:
    made = pruned("flux", "prune(0.9, pictures=1)")
    transformer = made.pipe.transformer
    assert min(len(transformer.transformer_blocks), len(transformer.single_transformer_blocks)) >= 1
    assert np.isfinite(draw(made)).all()


def test_without_prompts_it_says_what_to_give() -> None:
    with pytest.raises(
        Unsupported,
        match=r"it needs prompts to choose the blocks; give some: vivace.apply\(pipe, recipe, prompts=",
    ):
        vivace.apply(build("sd"), "prune")


@pytest.mark.parametrize("name", ["sdxl", "flux-dev"])
def test_random_weights_are_pruned_evenly_to_measure_what_it_saves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_all_small(monkeypatch)
    made = vivace.load(f"synthetic:{name}", "prune(0.3)", device="cpu")
    effect = made.effects["prune@denoiser"]
    assert "random weights" in str(effect["chosen"])
    assert len(set(names_of(made))) == effect["denoiser.blocks_taken_out"]
    made("a red circle", num_inference_steps=1, output_type="latent")


@pytest.mark.usefixtures("shallow")
@pytest.mark.long
def test_memory_of_pruned_blocks_is_predicted() -> None:
    plain, less = (predict(find_weightless("sdxl"), resolve(recipe)) for recipe in ("baseline", "prune(0.3)"))
    assert 0.6 < less.model_bytes / plain.model_bytes < 0.95
