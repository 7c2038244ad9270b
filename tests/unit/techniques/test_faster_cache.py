"""Guidance's unconditional half, made from the conditional one in some of the steps."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionControlNetPipeline
from diffusers.hooks.faster_cache import _split_low_high_freq

import vivace
from tests.families import build, draw, session
from vivace.errors import Unsupported
from vivace.machinery.technique.pipeline_code import doubles_latents
from vivace.techniques.faster_cache import _bands, _conditional

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")

UNETS = ("sd", "sdxl")


def counts(made: Any) -> tuple[int, int, int]:
    """Calls of the denoiser with half of the batch, with the whole, and without guidance."""
    evidence = made.evidence()
    return evidence["half_batch_calls"], evidence["whole_batch_calls"], evidence["unguided_calls"]


def rows_of(pipe: Any) -> list[int]:
    """The rows of each call of the UNet's own layers, filled as it draws."""
    rows: list[int] = []
    pipe.unet.conv_in.register_forward_hook(lambda _, __, output: rows.append(output.shape[0]))
    return rows


@pytest.mark.filterwarnings("ignore:torch.meshgrid")  # diffusers'
@pytest.mark.parametrize(("height", "width"), [(8, 8), (16, 10), (9, 13), (4, 32), (128, 96)])
def test_bands_are_those_of_diffusers(height: int, width: int) -> None:
    latents = torch.randn(2, 4, height, width, generator=torch.Generator().manual_seed(0))
    bands = _bands(latents)
    for band, expected in zip(bands, _split_low_high_freq(latents), strict=True):
        inverse = torch.fft.ifft2(torch.fft.ifftshift(expected))
        assert inverse.imag.abs().max() < 1e-5
        torch.testing.assert_close(band, inverse.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(sum(bands), latents)


@pytest.mark.parametrize("timestep", [900, 100])
@pytest.mark.parametrize("num", [2, 6])
def test_a_hit_adds_the_weighted_difference(timestep: int, num: int) -> None:
    pipe = build("sd")
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "sample": torch.randn(num, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(num, 7, pipe.unet.config.cross_attention_dim, generator=generator),
        "return_dict": False,
    }  # fmt: skip
    pipe.scheduler.set_timesteps(2)
    pipe.scheduler.timesteps = torch.tensor([timestep, timestep])
    pipe._num_timesteps = 2
    pipe._guidance_scale = 3.0
    with torch.no_grad():
        first, second = (
            pipe.unet(timestep=timestep, **arguments)[0],
            pipe.unet(timestep=timestep - 50, **arguments)[0],
        )
        made = vivace.apply(pipe, "faster_cache(hits=0.99, boost=0.5)")
        for _ in range(2):  # of so many hits the second step is none either
            assert torch.equal(pipe.unet(timestep=timestep, **arguments)[0], first)
        (hit,) = pipe.unet(timestep=timestep - 50, **arguments)
        other = pipe.unet(timestep=timestep - 50, **arguments | {"return_dict": True}).sample
    low, high = _bands(first[: num // 2] - first[num // 2 :])
    weights = (1.5, 1.0) if timestep > 301 else (1.0, 1.5)
    expected = second[num // 2 :] + weights[0] * low + weights[1] * high
    torch.testing.assert_close(hit[num // 2 :], second[num // 2 :])
    torch.testing.assert_close(hit[: num // 2], expected)
    assert torch.equal(other, hit)
    assert counts(made) == (2, 2, 0)


@pytest.mark.parametrize("family", UNETS)
def test_a_hit_computes_half_of_the_batch(family: str) -> None:
    pipe = build(family)
    rows = rows_of(pipe)
    made = vivace.apply(pipe, "faster_cache(hits=0.5)")
    draw(made, num_inference_steps=8)
    assert rows == [2, 2, 1, 2, 1, 2, 1, 2]
    assert counts(made) == (3, 5, 0)
    assert made.evidence()["cache_hit_rate"] == 3 / 8
    rows.clear()
    draw(made, ["a red circle", "a blue square", "a star"], num_inference_steps=3)
    assert rows == [6, 6, 3]


@pytest.mark.parametrize(
    ("recipe", "whole"),
    [
        ("faster_cache", [0, 1, 2, 3, 4, 6, 8, 10]),  # step 5 is the first below 641
        ("faster_cache(3)", [0, 1, 2, 3, 4, 7, 10]),
        ("faster_cache(2, start=1001)", [0, 2, 4, 6, 8, 10]),
        ("faster_cache(5, start=0)", list(range(12))),
        ("faster_cache(hits=0.3)", [0, 1, 2, 3, 5, 6, 8, 9, 11]),
    ],
)
@pytest.mark.quick("*whole0", "*whole4")
def test_which_steps_faster_cache_skips(recipe: str, whole: list[int]) -> None:
    pipe = build("sd")
    rows = rows_of(pipe)
    made = vivace.apply(pipe, recipe)
    for _ in range(2):
        rows.clear()
        draw(made, num_inference_steps=12)
        timesteps = pipe.scheduler.timesteps.tolist()
        assert [step for step, num in enumerate(rows) if num == 2] == whole, timesteps


def test_an_even_batch_without_guidance_is_not_split() -> None:
    prompts = ["a red circle", "a blue square"]
    made = session("sd", "faster_cache(2, start=1001)+guidance(1)")
    pictures = draw(made, prompts, num_inference_steps=4)
    assert np.array_equal(pictures, draw(session("sd", "guidance(1)"), prompts, num_inference_steps=4))
    assert counts(made) == (0, 0, 4)
    assert made.refuted({}) == (
        "faster_cache@denoiser: guidance was off (scale 1 or less), so there was no unconditional half to leave out"
    )


def test_the_conditional_half_of_nested_arguments() -> None:
    """What control nets and adapters add comes in lists and dicts; scales, timesteps and flags have no halves."""
    rows = torch.arange(4.0)[:, None]
    call_arguments = (
        (rows, torch.tensor(3.0)),
        {"added": {"ids": rows}, "residuals": [rows, (rows,)], "scale": 0.5, "t": rows[:1]},
    )
    args, kwargs = _conditional(call_arguments, 4)
    half = rows[2:]
    assert torch.equal(args[0], half)
    assert args[1] is call_arguments[0][1]
    assert torch.equal(kwargs["added"]["ids"], half)
    assert torch.equal(kwargs["residuals"][0], half)
    assert torch.equal(kwargs["residuals"][1][0], half)
    assert (kwargs["scale"], kwargs["t"].shape) == (0.5, (1, 1))


def test_who_runs_guidance_as_a_doubled_batch() -> None:
    assert doubles_latents(StableDiffusionControlNetPipeline.__new__(StableDiffusionControlNetPipeline))
    pipe = build("sd")
    pipe.unet.register_to_config(time_cond_proj_dim=256)
    with pytest.raises(Unsupported, match="takes the guidance scale as an input"):
        vivace.apply(pipe, "faster_cache")
