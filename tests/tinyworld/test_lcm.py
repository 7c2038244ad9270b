"""Latent consistency distillation: its arithmetic is LCMScheduler's and DDIM's, and its file is read by everybody."""

import argparse
import copy

import pytest
import torch
from diffusers import DDIMScheduler, LCMScheduler, StableDiffusionPipeline

from tinyworld import evaluate, networks, scenes, train_lcm
from vivace.machinery.lora.read_lora import merge

pytestmark = pytest.mark.long  # how the embedded models came to be, not what vivace does

RANK = 2


@pytest.fixture(scope="module")
def pipe():
    loaded = StableDiffusionPipeline.from_pretrained(
        evaluate.WEIGHTS / networks.SD_FOLDER, dtype=torch.float32
    )
    for model in (loaded.unet, loaded.text_encoder):
        model.requires_grad_(False).eval()
    return loaded


def loss_of(pipe, batch=4, skip=20):
    """The loss, its student's adapted layers, and a batch to give it."""
    torch.manual_seed(0)
    student = copy.deepcopy(pipe.unet)
    layers = train_lcm.adapt(student, RANK)
    args = argparse.Namespace(device="cpu", skip=skip, guidance=train_lcm.GUIDANCE, no_compile=True)
    ids = train_lcm.token_pool(scenes.sample(8, 0), 0)
    loss = train_lcm.ConsistencyLoss(pipe.unet, student, pipe.text_encoder, ids, args, batch)
    loss.latents = torch.randn(8, 4, 16, 16)
    return loss, layers


def moved(layers, amount=0.05):
    """Take the LoRA away from zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in layers.values():
            layer.up.copy_(amount * torch.randn(layer.up.shape, generator=generator))


@torch.no_grad()
def test_a_fresh_student_is_the_teacher_and_only_the_lora_learns(pipe):
    loss, layers = loss_of(pipe)
    x, at, words = torch.randn(1, 4, 16, 16), torch.tensor([499]), torch.randn(1, 32, 128)
    arguments = {"encoder_hidden_states": words}
    assert torch.allclose(
        loss.student(x, at, **arguments).sample, pipe.unet(x, at, **arguments).sample, atol=1e-5
    )
    learns = {name for name, p in loss.student.named_parameters() if p.requires_grad}
    assert learns == {f"{name}.{part}" for name in layers for part in ("down", "up")}
    assert {name.split(".")[0] for name in layers} == {"down_blocks", "mid_block", "up_blocks"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("begin", "until"), [(499, 479), (19, 0)], ids=["on the way", "to the picture itself"]
)
def test_the_teachers_step_is_the_ddim_schedulers(pipe, begin, until):
    loss, _ = loss_of(pipe)
    x, words, nothing = torch.randn(1, 4, 16, 16), torch.randn(1, 32, 128), torch.randn(1, 32, 128)
    start, end = torch.tensor([begin]), torch.tensor([until])
    free, conditioned = (pipe.unet(x, start, encoder_hidden_states=w).sample for w in (nothing, words))
    scheduler = DDIMScheduler.from_config(
        pipe.scheduler.config, timestep_spacing="trailing", clip_sample=False
    )
    scheduler.set_timesteps(train_lcm.ORIGINAL_STEPS)
    v = free + train_lcm.GUIDANCE * (conditioned - free)
    expected = scheduler.step(v, begin, x).prev_sample
    assert torch.allclose(loss.solve(x, start, end, words, nothing), expected, atol=1e-5)


@torch.no_grad()
def test_the_students_picture_is_the_one_that_the_scheduler_reads(pipe):
    loss, layers = loss_of(pipe)
    moved(layers)
    scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(4)
    assert {int(t) for t in scheduler.timesteps} <= set(range(19, 1000, 20))
    x, words = torch.randn(1, 4, 16, 16), torch.randn(1, 32, 128)
    for at in scheduler.timesteps:
        v = loss.student(x, at, encoder_hidden_states=words).sample
        scheduler._step_index = None
        expected = scheduler.step(v, at, x, generator=torch.Generator().manual_seed(0)).denoised
        assert torch.allclose(loss.consistent(x, at[None], words), expected, atol=1e-5)
    assert torch.equal(loss.consistent(x, torch.tensor([0]), words), x), "at the end, the picture itself"


@torch.no_grad()
def test_the_file_is_merged_into_what_was_trained(pipe, tmp_path):
    loss, layers = loss_of(pipe)
    moved(layers)
    train_lcm.save(tmp_path / "lora", layers, {"steps": 3})
    plain = copy.deepcopy(pipe)
    assert merge(plain, tmp_path / "lora" / train_lcm.FILE) == len(layers)
    arguments = {"encoder_hidden_states": torch.randn(1, 32, 128)}
    x, at = torch.randn(1, 4, 16, 16), torch.tensor([499])
    expected = loss.student(x, at, **arguments).sample
    assert not torch.allclose(pipe.unet(x, at, **arguments).sample, expected, atol=0.1)
    assert torch.allclose(plain.unet(x, at, **arguments).sample, expected, atol=1e-2), "fp16 in the file"
