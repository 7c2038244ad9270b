"""What is read from diffusers' code is what its pipelines do; a later diffusers that words it otherwise fails here."""

from typing import Any

import diffusers
import pytest

from vivace.machinery.technique import pipeline_code as code


def pipe(name: str) -> Any:
    kind = getattr(diffusers, name)
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("function", "yes", "no"),
    [
        (code.names_its_calls, ["FluxPipeline", "QwenImagePipeline"], ["StableDiffusionPipeline"]),
        (code.skips_layers, ["StableDiffusion3Pipeline"], ["StableDiffusionPipeline", "FluxPipeline"]),
        (
            code.guides_by_the_usual_scale,
            ["StableDiffusionPipeline", "StableDiffusion3Pipeline"],
            ["FluxPipeline", "QwenImagePipeline"],
        ),
        (code.doubles_latents, ["StableDiffusionPipeline", "StableDiffusionXLPipeline"], ["FluxPipeline"]),
        (code.replaces_processors, ["StableDiffusionPAGPipeline"], ["StableDiffusionPipeline"]),
        (
            code.rounds_steps_up,
            ["FluxImg2ImgPipeline", "StableDiffusion3Img2ImgPipeline"],
            ["StableDiffusionImg2ImgPipeline", "StableDiffusionPipeline"],
        ),
        (code.passes_sigmas_as_an_array, ["FluxPipeline"], ["StableDiffusionPipeline"]),
        (code.passes_a_shift_to_dynamic_schedulers, ["StableDiffusion3Pipeline"], ["FluxPipeline"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_code_of_pipelines_says_what_it_is_read_for(function: Any, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes if not function(pipe(name))] == []
    assert [name for name in no if function(pipe(name))] == []


def test_what_is_passed_to_the_scheduler() -> None:
    assert code.passed_to_set_timesteps(pipe("FluxPipeline")) == {"sigmas", "mu"}
    assert code.passed_to_set_timesteps(pipe("StableDiffusionPipeline")) == set()


def test_denoiser_calls_of_a_step_are_counted() -> None:
    assert code.number_of_denoiser_calls(pipe("StableDiffusionPipeline")) == 1
    assert code.number_of_denoiser_calls(pipe("StableDiffusion3Pipeline")) == 2


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("StableDiffusionPipeline", ("prompt_embeds", "negative_prompt_embeds")),
        ("FluxPipeline", ("prompt_embeds", "pooled_prompt_embeds", None)),
        ("LongCatImagePipeline", ("prompt_embeds", None)),
        ("QwenImage21Pipeline", ("prompt_embeds", "prompt_embeds_mask", None)),
    ],
)
def test_encoded_values_are_named_as_the_call_takes_them(name: str, names: tuple[str | None, ...]) -> None:
    assert code.encoded_names(pipe(name)) == names
