"""Recipes applied to pipelines, as a Python user meets them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import families, shrunken
from tests.targets import target_of
from vivace.errors import NoEffect, RecipeError, UnknownModel, Unsupported, UsageError
from vivace.machinery.technique import component_of
from vivace.measure.machine import this_machine
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.session import Session

pytestmark = pytest.mark.usefixtures("small_images")

PROMPTS = ["a red circle", "a blue square", "a green triangle"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def seeds(*numbers: int) -> Any:
    made = [torch.Generator().manual_seed(n) for n in numbers]
    return made if len(made) > 1 else made[0]


def draw(session: Any, prompt: Any, *numbers: int, **call: Any) -> np.ndarray:
    return np.asarray(session(prompt, generator=seeds(*numbers), output_type="np", **call).images)


def pipeline() -> Any:
    return load_pipeline(find_model("tiny-sd"), "cpu")


def test_load_is_called_like_the_pipeline() -> None:
    session = vivace.load("tiny-sd", "steps(3)+tiny_vae")
    assert session.recipe.text == "tiny_vae+steps(3)"
    image = session("a red circle", generator=seeds(0)).images[0]
    assert image.size == (128, 128)
    assert set(session.effects) == {"tiny_vae@vae", "steps"}
    plain = vivace.load("tiny-sd")
    assert plain.recipe.is_baseline
    assert plain.effects == {}


def test_apply_takes_a_pipeline_that_the_user_has() -> None:
    pipe = pipeline()
    session = vivace.apply(pipe, "bf16+cfg_cutoff(0.4)")
    assert session.pipe is pipe
    assert pipe.unet.dtype == torch.bfloat16
    picture = draw(session, PROMPTS[0], 0, num_inference_steps=5)
    assert np.isfinite(picture).all()
    assert session.evidence() == {"guided_steps": 2, "unguided_steps": 3}


def test_what_is_passed_to_the_call_wins() -> None:
    session = vivace.load("tiny-sd", "steps(2)")
    calls: list[int] = []

    def count(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        calls.append(step)
        return tensors

    draw(session, PROMPTS[0], 0, callback_on_step_end=count)
    assert len(calls) == 2
    calls.clear()
    draw(session, PROMPTS[0], 0, callback_on_step_end=count, num_inference_steps=4)
    assert len(calls) == 4


def test_the_users_own_callback_is_chained_behind_ours() -> None:
    session = vivace.load("tiny-sd", "cfg_cutoff(0.5)+steps(4)")
    shapes: list[int] = []

    def look(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        shapes.append(tensors["prompt_embeds"].shape[0])
        return {}

    draw(
        session,
        PROMPTS[0],
        0,
        callback_on_step_end=look,
        callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
    )
    assert shapes == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "recipe", ["bf16@denoiser", "bf16@vae", "bf16@text_encoder", "bf16@denoiser,vae", "bf16"]
)
@pytest.mark.quick("bf16@vae")
def test_components_of_different_dtypes_fit_together(recipe: str) -> None:
    reference = draw(vivace.load("tiny-sd", "steps(4)"), PROMPTS[0], 0)
    session = vivace.load("tiny-sd", f"{recipe}+steps(4)")
    picture = draw(session, PROMPTS[0], 0)
    assert -10 * np.log10(np.mean((picture - reference) ** 2)) > 25
    parts = recipe.partition("@")[2].split(",") if "@" in recipe else ["denoiser", "vae", "text_encoder"]
    for component in ("denoiser", "vae", "text_encoder"):
        dtype = component_of(session.pipe, component).dtype
        assert dtype == (torch.bfloat16 if component in parts else torch.float32), component


def test_a_recipe_that_changes_nothing_is_refused() -> None:
    with pytest.raises(NoEffect, match="fp32 already"):
        vivace.load("tiny-sd", "fp32")
    session = vivace.load("tiny-sd", "fp32+steps(3)")
    assert session.warnings == ["dtype: every targeted component is fp32 already"]
    assert list(session.effects) == ["steps"]


def test_unsupported_says_why() -> None:
    with pytest.raises(Unsupported, match="no cudnn attention kernel for CPUs"):
        vivace.load("tiny-sd", "attention(cudnn)")
    with pytest.raises(Unsupported, match="is not compatible with"):
        vivace.load("tiny-sd", "scheduler(flow_euler)")
    with pytest.raises(Unsupported, match="no tiny VAE is known"):
        vivace.apply(pipeline(), "tiny_vae")


def test_wrong_names() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'tiny-sd'"):
        vivace.load("tiny-ds")
    with pytest.raises(RecipeError, match="did you mean"):
        vivace.load("tiny-sd", "tiny_vea")


@pytest.mark.soak
def test_no_class_is_patched() -> None:
    from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel

    before = [StableDiffusionPipeline.__call__, UNet2DConditionModel.forward, AutoencoderKL.decode]
    session = vivace.load("tiny-sd", "bf16+attention(math)+compile(backend=eager)+cfg_cutoff(0.5)+steps(2)")
    draw(session, PROMPTS[0], 0)
    assert [StableDiffusionPipeline.__call__, UNet2DConditionModel.forward, AutoencoderKL.decode] == before
    fresh = pipeline()
    assert "forward" not in vars(fresh.unet)


def test_positional_arguments_reach_the_pipeline() -> None:
    session = vivace.load("tiny-sd", "steps(2)")
    image = session("a red circle", 64, 96, generator=seeds(0)).images[0]
    assert image.size == (96, 64)


@pytest.mark.parametrize("scheduler", ["euler_a", "dpmpp_2m_sde", "ddim"])
@pytest.mark.quick("euler_a", "dpmpp_2m_sde")
def test_noise_is_drawn_in_fp32_whatever_the_dtype(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a seed gives other numbers in another dtype, the comparison would be of two seeds."""
    change = "" if scheduler == "euler_a" else f"+scheduler({scheduler})"
    drawn: list[torch.dtype] = []
    randn = torch.randn

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(kwargs.get("dtype", torch.float32))
        return randn(*args, **kwargs)

    session = vivace.load("tiny-sd", f"bf16+steps(3){change}")
    monkeypatch.setattr(torch, "randn", spy)
    picture = draw(session, PROMPTS[0], 0)
    assert drawn
    assert set(drawn) == {torch.float32}
    monkeypatch.undo()
    reference = draw(vivace.load("tiny-sd", f"steps(3){change}"), PROMPTS[0], 0)
    assert -10 * np.log10(np.mean((picture - reference) ** 2)) > 20


@pytest.mark.parametrize("recipe", ["int8", "fuse_qkv+int8@denoiser,text_encoder+channels_last"])
@pytest.mark.quick("fuse_qkv*")
def test_layers_that_are_brought_one_by_one_draw_the_same_picture(recipe: str) -> None:
    call = {"num_inference_steps": 2}
    reference = draw(vivace.apply(pipeline(), recipe), "a red circle", 0, **call)
    pipe = pipeline()
    target = target_of(this_machine("cpu"), pipe, on_host=True)
    session = Session(pipe, resolve(recipe), target)
    assert np.array_equal(draw(session, "a red circle", 0, **call), reference)
    assert session.recipe.loads_from_host
    assert not resolve("bf16+compile").loads_from_host


def test_what_draws_before_it_shrinks_the_model_needs_it_on_the_gpu() -> None:
    assert resolve("int8+offload(model)").loads_from_host
    assert not resolve("fp8_static+offload(model)").loads_from_host


def test_a_call_that_fails_while_decoding_leaves_the_vae_as_it_was(tmp_path: Path) -> None:
    folder = shrunken.save(shrunken.sdxl(), tmp_path / "sdxl", (None, "fp16"))
    session = vivace.load(str(folder), "fp16", device="cpu")
    session.pipe.vae.register_to_config(force_upcast=True)
    call = {"height": 64, "width": 64, "num_inference_steps": 1}
    first = draw(session, PROMPTS[0], 0, **call)
    decode = session.pipe.vae.decode

    def too_much(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("too many images")

    session.pipe.vae.decode = too_much
    with pytest.raises(torch.OutOfMemoryError):
        draw(session, PROMPTS[0], 0, **call)
    session.pipe.vae.decode = decode
    assert session.pipe.vae.dtype == torch.float16
    assert np.array_equal(draw(session, PROMPTS[0], 0, **call), first)


def test_an_argument_that_would_be_ignored_is_refused() -> None:
    session = families.session("sd")
    with pytest.raises(UsageError, match=r"ignores the argument 'seed'; give generator=torch.Generator"):
        session("a red circle", seed=1)
    with pytest.raises(UsageError, match="'num_inference_step'; did you mean 'num_inference_steps'"):
        session("a red circle", num_inference_step=1)
