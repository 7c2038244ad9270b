"""A model's safety checker replaces images by black ones: every command says so."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from transformers import CLIPConfig, CLIPImageProcessor

import vivace
from tests import shrunken
from tests.typed import run_vivace
from vivace.benchmark import Timing
from vivace.entry_points import apply
from vivace.models.find import find_model
from vivace.runtime.finite_images import HiddenImageWarning, hidden_images

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}


@pytest.fixture
def pipe() -> Any:
    """A pipeline whose checker objects to every image."""
    pipe = shrunken.sd15()
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 16, "projection_dim": 16,
    }  # fmt: skip
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=16))
    checker.concept_embeds_weights.data.fill_(-2.0)
    size = {"height": 32, "width": 32}
    pipe.register_modules(
        safety_checker=checker.eval(),
        feature_extractor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
    )
    pipe.register_to_config(requires_safety_checker=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_session_warns_and_says_which_image(pipe: Any) -> None:
    session = apply(pipe)
    with pytest.warns(
        HiddenImageWarning, match=r"replaced 2 of 2 images of this call by black ones \(from 0: 0, 1\)"
    ):
        output = session(["a red circle"] * 2, generator=torch.Generator().manual_seed(0), **SMALL)
    assert hidden_images(output) == (True, True)
    assert all(image.getextrema() == ((0, 0),) * 3 for image in output.images)
    with pytest.warns(HiddenImageWarning):
        session(["a red circle"], return_dict=False, **SMALL)
    pipe.safety_checker.concept_embeds_weights.data.fill_(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = session("a red circle", **SMALL)
    assert hidden_images(output) == (False,)


def test_generate_names_the_file(pipe: Any, tmp_path: Path) -> None:
    folder = shrunken.save(pipe, tmp_path / "model")
    size = ["--height", "64", "--width", "64", "--num-inference-steps", "2", "--device", "cpu"]
    done = run_vivace(tmp_path, "generate", "a red circle", "--model", str(folder), *size)
    (path,) = done.stdout.split()
    assert f"warning: {path} is black: the model's safety checker replaced the image of seed 0" in done.stderr


@pytest.mark.long
def test_a_row_says_it_and_its_quality_is_not_passed(pipe: Any, tmp_path: Path) -> None:
    folder = shrunken.save(pipe, tmp_path / "model")
    assert find_model(str(folder)).pipeline == "StableDiffusionPipeline"
    timing = Timing(rounds=1, repeats=1, max_warmup=1)
    prompts = ["a red circle", "a blue square"]
    ran = vivace.bench(
        str(folder), ["baseline", "channels_last"], prompts=prompts, timing=timing, store=tmp_path / "store",
        device="cpu", **SMALL,
    )  # fmt: skip
    for row in ran.rows():
        (said_of_it,) = [text for text in row.warnings if "safety checker" in text]
        assert (
            "replaced 2 of 2 images by black ones, which say nothing of quality: 'a red circle' with seed 0"
            in said_of_it
        )
        assert row.judgement is None or row.judgement.gate.value != "passed"
