"""Decoding in tiles and in slices: what it does to the image, and when it does nothing."""

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, draw, drawn, psnr, session
from vivace.errors import NoEffect, RecipeError, Unsupported
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless

PROMPTS = ["a red circle", "a blue square", "a star"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(64, 64), (64, 96), (96, 64), (112, 80)])
@pytest.mark.diagonal
@pytest.mark.quick("size1-sdxl", "size2-flux")
def test_tiles_make_a_whole_picture_near_the_untiled_one(family: str, size: tuple[int, int]) -> None:
    height, width = size
    reference = drawn(family, height=height, width=width)
    tiled = session(family, "vae_tiling(32)")
    picture = draw(tiled, height=height, width=width)
    assert picture.shape == reference.shape == (1, height, width, 3)
    assert not np.array_equal(picture, reference), "an approximation"
    # A small VAE balances brightness over the whole image, so its tiles differ from each other.
    assert psnr(picture, reference) > {"sd": 8, "sdxl": 15, "flux": 12}[family]
    assert tiled.evidence() == {
        "vae_decodes": 1,
        "vae_tiled_decodes": 1,
        "vae_largest_side_px": max(size),
    }
    assert tiled.refuted({}) is None
    assert not tiled.recipe.same_picture


@pytest.mark.parametrize("recipe", ["vae_tiling", "vae_tiling(128)", "tiny_vae+vae_tiling"])
@pytest.mark.quick("tiny_vae*")
def test_a_picture_that_fits_into_one_tile_refutes_it(recipe: str) -> None:
    tiled = vivace.load("tiny-sd", f"{recipe}+steps(2)")
    reference = draw(
        vivace.load("tiny-sd", "tiny_vae" if "tiny" in recipe else "baseline"), num_inference_steps=2
    )
    assert psnr(draw(tiled, num_inference_steps=2), reference) > 100
    side = 512 if "tiny" in recipe else 128
    assert f"up to 64 px fit into one tile of {side} px" in (tiled.refuted({}) or "")


@pytest.mark.parametrize(("height", "width"), [(128, 128), (128, 64)])
@pytest.mark.quick("128-64")
def test_a_tiny_vae_in_tiles(height: int, width: int) -> None:
    reference = draw(vivace.load("tiny-sd", "tiny_vae"), height=height, width=width)
    tiled = vivace.load("tiny-sd", "tiny_vae+vae_tiling(64, overlap=0.25)")
    assert psnr(draw(tiled, height=height, width=width), reference) > 20
    assert tiled.evidence()["vae_tiled_decodes"] == 1


def test_tiles_that_would_not_meet_are_refused_in_words() -> None:
    with pytest.raises(Unsupported, match=r"tiles of 72 px .* multiple of 32 px"):
        session("sd", "vae_tiling(72)")
    with pytest.raises(Unsupported, match=r"multiple of 40 px"):
        session("sd", "vae_tiling(64, overlap=0.2)")
    with pytest.raises(RecipeError, match="whole number or None, at least 16 and at most 8192"):
        resolve("vae_tiling(4)")
    with pytest.raises(NoEffect, match="already decodes in tiles of 64 px"):
        vivace.apply(session("sd", "vae_tiling(64)").pipe, "vae_tiling")
    pipe = build("sd")
    pipe.vae = torch.nn.Identity()
    with pytest.raises(Unsupported, match="cannot decode Identity in tiles"):
        vivace.apply(pipe, "vae_tiling")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("sd")
def test_slices_are_what_the_pictures_are_alone(family: str) -> None:
    whole, sliced = session(family), session(family, "vae_slicing")
    assert psnr(draw(sliced, PROMPTS), draw(whole, PROMPTS)) > 80
    assert sliced.evidence() == {"vae_batch": 3, "vae_slices": 3}
    assert sliced.refuted({}) is None


def test_one_picture_refutes_slicing() -> None:
    sliced = session("sd", "vae_slicing")
    draw(sliced)
    assert (
        sliced.refuted({})
        == "vae_slicing@vae: every call generated one image, so there was no batch to slice"
    )
    with pytest.raises(NoEffect, match="already decodes image by image"):
        vivace.apply(sliced.pipe, "vae_slicing")


@pytest.mark.usefixtures("shallow")
@pytest.mark.long
def test_their_memory_is_predicted() -> None:
    def vae(recipe: str, batch: int, name: str = "sdxl") -> int:
        return predict(find_weightless(name), resolve(recipe), batch=batch).stages["vae"]

    whole = vae("baseline", 2)
    assert vae("vae_slicing", 2) < whole
    assert vae("vae_tiling(512)", 2) < whole
    small = vae("baseline", 1, "tiny-sd")
    assert vae("vae_tiling", 1, "tiny-sd") == small, "nothing to split"
    with pytest.raises(Unsupported, match="no batch to slice"):
        vae("vae_slicing", 1, "tiny-sd")
