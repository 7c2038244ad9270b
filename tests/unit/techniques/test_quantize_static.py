"""Static scales of activations: calibrated, cached, and loaded again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import vivace
from tests.families import build, draw, psnr, session
from vivace.errors import RecipeError, Unsupported
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session

pytestmark = pytest.mark.usefixtures("small_images")

PROMPTS = ["a red circle above a blue square", "a large green triangle"]
RECIPE = "quantize(fp8_static, pictures=2)"
CALL = {"height": 64, "width": 64, "num_inference_steps": 3}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    return tmp_path / "scales"


def opened(recipe: str = RECIPE, prompts: list[str] = PROMPTS, model: str = "tiny-sd") -> Session:
    torch.set_num_threads(1)
    located = find_model(model)
    return session_of(load_pipeline(located, "cpu"), located, resolve(recipe), "cpu", dict(CALL), prompts)


def how(made: Session) -> Any:
    (effect,) = (effect for label, effect in made.effects.items() if label.startswith("quantize"))
    return effect["scales"]


def test_it_is_calibrated_once_and_draws_the_same_when_reloaded(cache: Path) -> None:
    first = opened()
    assert how(first) == "calibrated on 2 images"
    (file,) = cache.iterdir()
    assert first.effects["quantize@denoiser"]["scales_file"] == file.name
    picture = draw(first)
    assert 25 < psnr(picture, draw(opened("baseline"))) < 60
    second = opened()
    assert how(second) == "reloaded, calibrated on 2 images"
    assert np.array_equal(draw(second), picture)
    assert second.evidence() == first.evidence()
    assert second.refuted({}) is None


def test_scales_are_the_largest_inputs_seen(cache: Path) -> None:
    largest: dict[str, float] = {}
    plain = opened("baseline")
    layer = plain.pipe.unet.time_embedding.linear_2

    def look(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        largest["seen"] = max(largest.get("seen", 0.0), float(inputs[0].abs().max()))

    layer.register_forward_pre_hook(look)
    for k, prompt in enumerate(PROMPTS):
        plain.pipe(prompt=prompt, generator=torch.Generator().manual_seed(k), **plain.defaults)
    opened()
    (file,) = cache.iterdir()
    with safe_open(str(file), framework="pt") as scales:
        scale = scales.get_tensor("denoiser.time_embedding.linear_2")
    assert scale.shape == (1, 1), "as many dimensions as the inputs"
    assert float(scale) == pytest.approx(largest["seen"] / 448, rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "prompts"),
    [
        (RECIPE, ["a star"]),
        ("quantize(fp8_static, pictures=1)", PROMPTS),
        ("quantize(fp8_static, pictures=2, skip=conv_shortcut)", PROMPTS),
        (f"bf16+{RECIPE}", PROMPTS),
        (f"fuse_qkv+{RECIPE}", PROMPTS),
    ],
)
@pytest.mark.long
@pytest.mark.exhaustive("bf16*", "*skip=*")
def test_other_questions_have_other_scales(cache: Path, recipe: str, prompts: list[str]) -> None:
    opened()
    if "skip" in recipe:
        # What is left alone needs no scale; here nothing but a convolution is, so the scales are the same.
        assert "reloaded" in how(opened(recipe, prompts))
        return
    assert "reloaded" not in how(opened(recipe, prompts))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", b"not a file of scales at all"]
)
@pytest.mark.quick("not a file*")
def test_a_damaged_file_is_made_anew(cache: Path, content: bytes) -> None:
    picture = draw(opened())
    (file,) = cache.iterdir()
    file.write_bytes(content)
    again = opened()
    assert how(again) == "calibrated on 2 images"
    assert np.array_equal(draw(again), picture)
    assert how(opened()) == "reloaded, calibrated on 2 images"


def test_a_cache_that_cannot_be_written_to_costs_the_file_alone(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "file"))
    made = opened()
    assert how(made) == "calibrated on 2 images"
    assert made.effects["quantize@denoiser"]["scales_file"] == "not kept"


@pytest.mark.long
def test_a_pipeline_of_the_users_own(cache: Path) -> None:
    with pytest.raises(Unsupported, match=r"there are no prompts; give some: vivace.apply\(pipe"):
        session("sd", RECIPE)
    made = vivace.apply(build("sd"), "quantize(fp8_static, pictures=1)", prompts=["a star"])
    assert made.effects["quantize@denoiser"]["scales_file"] == "not kept", "whose scales they are is unknown"
    assert not cache.exists()
    assert np.isfinite(draw(made)).all()


def test_layers_that_were_never_called_are_left_alone(cache: Path) -> None:
    """A VAE's encoder draws nothing."""
    made = opened("quantize(fp8_static, pictures=1)@vae")
    effect = made.effects["quantize@vae"]
    assert effect["vae.quantized_layers"] == 4, "the decoder's attention"
    kept = made.evidence()["vae.left_alone"]
    assert isinstance(kept, list)
    assert any("encoder.mid_block" in line and "not called while calibrating" in line for line in kept)
    again = opened("quantize(fp8_static, pictures=1)@vae")
    assert how(again).startswith("reloaded")
    assert again.evidence() == made.evidence()


def test_it_needs_a_gpu_that_multiplies_in_fp8_or_none() -> None:
    with pytest.raises(RecipeError, match="pictures is for schemes that are calibrated; fp8 is not"):
        resolve("quantize(fp8, pictures=2)")
    with pytest.raises(RecipeError, match="pictures"):
        resolve("quantize(fp8_static, pictures=0)")
