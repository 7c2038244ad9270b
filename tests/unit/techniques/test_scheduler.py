"""Samplers in each other's place."""

import pytest

import vivace


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_latents_are_not_clipped(sampler: str) -> None:
    session = vivace.load("tiny-sd", f"scheduler({sampler})")
    assert session.pipe.scheduler.config.clip_sample is False, "it is true by default, for pixels"


def test_a_model_that_says_so_keeps_its_clipping() -> None:
    from diffusers import DDIMScheduler

    pipe = vivace.load("tiny-sd").pipe
    pipe.scheduler = DDIMScheduler(clip_sample=True)
    session = vivace.apply(pipe, "scheduler(ddpm)")
    assert session.pipe.scheduler.config.clip_sample is True
