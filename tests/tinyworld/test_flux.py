"""The FLUX family on a CPU: what training gives the transformer is what FluxPipeline gives it."""

import argparse

import pytest
import torch
from diffusers import FluxPipeline

from tinyworld import flux, networks, tokenizer, train_flux

pytestmark = pytest.mark.long  # how the embedded models came to be, not what vivace does
PROMPTS = ["a red circle above a blue square", "a zebra 🙂 żółw"]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """An untrained pipeline of the true sizes, read from where training would write it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / flux.FOLDER
    vae, transformer = networks.build_vae(flux.CHANNELS), flux.build_transformer()
    flux.save(folder, vae, transformer, flux.build_clip_text(), flux.build_t5())
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noises(number):
    shape = (1, flux.CHANNELS, networks.LATENT_SIDE, networks.LATENT_SIDE)
    return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in range(number)])


@torch.no_grad()
def test_training_and_the_pipeline_give_the_same_prediction(pipe):
    """Packing, places, both encoders, the scale of sigma and of guidance: every call of a whole sampling."""
    calls = []
    hook = pipe.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    try:
        ends = pipe(
            PROMPTS,
            num_inference_steps=flux.STEPS,
            guidance_scale=2.5,
            generator=[torch.Generator().manual_seed(k) for k in range(2)],
            output_type="latent",
            **flux.CALL,
        ).images
    finally:
        hook.remove()
    assert len(calls) == flux.STEPS
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), PROMPTS))
    embeddings = flux.encode(pipe.text_encoder, pipe.text_encoder_2, ids)
    where, levels = flux.position_ids("cpu"), flux.sigmas(flux.STEPS)
    latents = flux.pack(noises(2))
    for step, (arguments, predicted) in enumerate(calls):
        assert torch.allclose(arguments["hidden_states"], latents, atol=1e-4)
        if step in (0, 9, 27):
            sigma = torch.full((2,), levels[step])
            made = flux.velocity(pipe.transformer, latents, sigma, embeddings, where, torch.full((2,), 2.5))
            assert torch.allclose(made, predicted, atol=1e-4), step
            other = flux.velocity(pipe.transformer, latents, sigma, embeddings, where, torch.full((2,), 5.0))
            assert not torch.allclose(other, predicted, atol=1e-4), "the guidance scale is heard"
        latents = latents + (levels[step + 1] - levels[step]) * predicted
    assert torch.allclose(ends, latents, atol=1e-4)


@torch.no_grad()
def test_the_training_loss_calls_the_transformer_as_the_pipeline_does(pipe):
    """With the picture unknown (sigma 1) the loss's input is the sampler's first, and so is its prediction."""
    args = argparse.Namespace(device="cpu", no_compile=True)
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), PROMPTS))
    loss = train_flux.TeacherLoss(pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, ids, args, 2)
    picture, noise = torch.randn(2, flux.TOKENS, flux.TOKEN_WIDTH), flux.pack(noises(2))
    first = []
    hook = pipe.transformer.register_forward_hook(lambda m, a, output: first.append(output[0].detach()))
    try:
        value, _ = loss.compute(picture, ids, noise, torch.ones(2), torch.ones(2))
        pipe(
            PROMPTS,
            num_inference_steps=1,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(k) for k in range(2)],
            output_type="latent",
            **flux.CALL,
        )
    finally:
        hook.remove()
    assert torch.allclose(first[0], first[1], atol=1e-4)
    assert torch.allclose(value, (first[1] - (noise - picture)).square().mean(), rtol=1e-3)


@torch.no_grad()
def test_guidance_can_be_built_in():
    torch.manual_seed(0)
    student = flux.build_transformer()
    fast = flux.without_guidance(student)
    latents, where = flux.pack(noises(2)), flux.position_ids("cpu")
    embeddings = flux.PromptEmbeddings(torch.randn(2, 32, 128), torch.randn(2, 128))
    sigma = torch.tensor([0.3, 0.9])
    guided = flux.velocity(student, latents, sigma, embeddings, where, torch.full((2,), flux.GUIDANCE))
    assert torch.allclose(flux.velocity(fast, latents, sigma, embeddings, where, None), guided, atol=1e-5)
