"""The shipped models, through diffusers' own classes, on CPU."""

import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tinyworld import evaluate, networks, scenes, verifier
from tinyworld.train_vae import psnr

SD = evaluate.WEIGHTS / networks.SD_FOLDER
TINY_VAE = evaluate.WEIGHTS / networks.TINY_VAE_FOLDER


@pytest.fixture(scope="module")
def pipe():
    from diffusers import StableDiffusionPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party imports
        pipe = StableDiffusionPipeline.from_pretrained(SD)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def tiny_vae():
    from diffusers import AutoencoderTiny

    return AutoencoderTiny.from_pretrained(TINY_VAE)


def folder_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_folders_are_small_and_half_precision():
    assert folder_bytes(SD) <= 14_000_000
    assert folder_bytes(TINY_VAE) <= 1_000_000
    for file in [*SD.rglob("*.safetensors"), *TINY_VAE.rglob("*.safetensors")]:
        with safe_open(file, "pt") as tensors:
            kinds = {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
        assert kinds <= {"F16", "I64"}, file


def test_a_plain_load_draws_what_it_is_told(pipe):
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}
    caption = "a red circle above a blue square"
    draw = torch.Generator().manual_seed(0)
    made = pipe(caption, num_inference_steps=25, guidance_scale=4.0, generator=draw).images[0]
    assert made.size == (128, 128)
    assert verifier.verify(np.array(made), caption).right


@pytest.mark.soak
def test_accuracy_has_not_fallen(pipe):
    """12 held-out captions; on one thread in fp32 the shipped weights get all of them right."""
    prompts = evaluate.held_out_captions(12)
    setting = evaluate.Setting(dtype="fp32", steps=20)
    result = verifier.score(evaluate.draw(pipe, prompts, setting, batch=6), prompts)
    assert result["colour"]["accuracy"] >= 0.9, result
    assert result["shape"]["accuracy"] >= 0.9, result
    assert result["where"]["accuracy"] >= 0.9, result
    assert result["everything"]["accuracy"] >= 0.8, result


@pytest.mark.long
def test_tiny_vae_takes_the_vaes_place(pipe, tiny_vae):
    prompts = evaluate.held_out_captions(2)
    setting = evaluate.Setting(dtype="fp32", steps=20)
    usual = evaluate.draw(pipe, prompts, setting)
    before, pipe.vae = pipe.vae, tiny_vae
    try:
        tiny = evaluate.draw(pipe, prompts, setting)
    finally:
        pipe.vae = before
    error = np.square(usual.astype(float) - tiny).mean() / 255**2
    assert 25 < psnr(error) < 60, "close to the VAE's picture, but not the same"
    assert verifier.score(tiny, prompts)["colour"]["accuracy"] >= 0.8


@torch.no_grad()
def test_round_trips_keep_the_picture(pipe, tiny_vae):
    true = scenes.draw(scenes.sample(12, 77, "held_out"))[0]
    latents = pipe.vae.encode(true * 2 - 1).latent_dist.mean
    big = pipe.vae.decode(latents).sample / 2 + 0.5
    small = tiny_vae.decode(latents * pipe.vae.config.scaling_factor).sample / 2 + 0.5
    own = tiny_vae.decode(tiny_vae.encode(true * 2 - 1).latents).sample / 2 + 0.5
    assert psnr(float((big - true).square().mean())) >= 40
    assert psnr(float((small - true).square().mean())) >= 36
    assert psnr(float((own - true).square().mean())) >= 36
    assert abs(float(latents.mean())) < 0.3
    assert 0.7 < float(latents.std()) < 1.3, "the UNet was trained on latents of unit variance"
