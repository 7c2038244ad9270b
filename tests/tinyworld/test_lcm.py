"""Latent consistency distillation: its arithmetic is LCMScheduler's and DDIM's, and its file is read by everybody."""

import argparse
import copy
import json
import sys

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, LCMScheduler, StableDiffusionPipeline
from safetensors import safe_open

from tinyworld import evaluate, evaluate_lcm, loop, networks, scenes, table, train_lcm
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


def test_only_timesteps_of_the_scheduler_are_learnt_and_all_of_them(pipe, monkeypatch):
    loss, _ = loss_of(pipe, batch=200)
    calls = []
    monkeypatch.setattr(loss, "compute", lambda latents, noise, start, ids: calls.append((start, ids)))
    loss()
    start, ids = calls[0]
    assert set(start.tolist()) == set(range(19, 1000, 20))
    assert ids.shape == (200, 32)


def test_no_gradient_comes_through_the_target(pipe):
    """With the target's student frozen the gradient is the same."""
    loss, layers = loss_of(pipe, batch=2)
    moved(layers)
    inputs = (
        torch.randn(2, 4, 16, 16),
        torch.randn(2, 4, 16, 16),
        torch.tensor([259, 19]),
        loss.ids[:2, 0].long(),
    )
    loss._compute(*inputs)[0].backward()
    before = [layer.up.grad.clone() for layer in layers.values()]
    loss.student.zero_grad()
    frozen = copy.deepcopy(loss.student)
    consistent, calls = loss.consistent, []

    def first_by_the_frozen_one(*args):
        calls.append(args)
        loss.student, kept = (frozen if len(calls) == 1 else loss.student), loss.student
        made = consistent(*args)
        loss.student = kept
        return made

    loss.consistent = first_by_the_frozen_one
    loss._compute(*inputs)[0].backward()
    assert len(calls) == 2
    for layer, expected in zip(layers.values(), before, strict=True):
        assert torch.allclose(layer.up.grad, expected, atol=1e-7)


@pytest.mark.soak
def test_the_consistency_loss_falls_on_a_small_problem(pipe, tmp_path):
    loss, layers = loss_of(pipe, batch=4, skip=200)
    moved(layers)
    inputs = (
        torch.randn(4, 4, 16, 16),
        torch.randn(4, 4, 16, 16),
        torch.tensor([999, 759, 499, 259]),
        loss.ids[:4, 0].long(),
    )
    training = loop.Loop(
        "small",
        {"unet": loss.student},
        lambda: loss._compute(*inputs),
        figures=(),
        rate=3e-3,
        budget=loop.Budget(steps=12, print_every_s=0.0),
        checkpoint=tmp_path / "small.pt",
        warm_up=1,
    )
    before = loss._compute(*inputs)[0].item()
    training.run()
    assert loss._compute(*inputs)[0].item() < 0.8 * before
    kept = torch.load(tmp_path / "small.pt", weights_only=True)["weights"]
    assert len(kept) == 2 * len(layers), "the checkpoint holds the LoRA alone"


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.soak
def test_training_stops_resumes_and_says_how_it_was_done(tmp_path, monkeypatch):
    def train(*more):
        toy = ["--out", str(tmp_path), "--scenes", "4", "--batch", "2", "--device", "cpu", "--rank", "2"]
        monkeypatch.setattr(sys, "argv", ["train", *toy, *more])
        train_lcm.main()

    train("--steps", "100", "--stop-s", "0")
    assert (tmp_path / f"{train_lcm.FOLDER}.so-far" / train_lcm.FILE).exists()
    assert not (tmp_path / train_lcm.FOLDER).exists()
    done = torch.load(tmp_path / "lcm.pt", weights_only=True)["step"]
    assert done >= 1
    train("--steps", str(done + 1))
    with safe_open(tmp_path / train_lcm.FOLDER / train_lcm.FILE, "pt") as file:
        facts = json.loads(file.metadata()["training"])
        shapes = {key: file.get_tensor(key).shape for key in file.keys()}  # noqa: SIM118
    assert (facts["steps"], facts["finished"], facts["rank"], facts["guidance"]) == (done + 1, True, 2, 4.0)
    assert {shape[0] for key, shape in shapes.items() if ".lora_A." in key} == {2}


@pytest.mark.soak
def test_the_loss_is_one_graph(pipe):
    loss, _ = loss_of(pipe, batch=2)
    inputs = (
        torch.randn(2, 4, 16, 16),
        torch.randn(2, 4, 16, 16),
        torch.tensor([999, 19]),
        loss.ids[:2, 0].long(),
    )
    torch._dynamo.reset()
    whole = torch.compile(loss._compute, backend="aot_eager", dynamic=False, fullgraph=True)
    value = whole(*inputs)[0]
    value.backward()
    assert torch.allclose(value, loss._compute(*inputs)[0], rtol=1e-3)


@pytest.mark.soak
def test_the_evaluation_writes_a_record_that_fills_its_tables(pipe, tmp_path, monkeypatch):
    _, layers = loss_of(pipe)
    moved(layers, 0.001)
    facts = {"steps": 3, "seconds": 1.0, "batch": 2, "rank": RANK, "skip": 20, "rate": 1e-3, "guidance": 4.0}
    train_lcm.save(tmp_path / "lora", layers, {**facts, "device": "CPU", "finished": True})
    lora, record = tmp_path / "lora" / train_lcm.FILE, tmp_path / "record.json"
    kinds = (evaluate_lcm.PLAIN, evaluate_lcm.SAMPLER, evaluate_lcm.LORA)
    monkeypatch.setattr(evaluate_lcm, "ROWS", tuple(evaluate_lcm.Drawn(what, 2) for what in kinds))
    arguments = ["--record", str(record), "--captions", "2", "--device", "cpu", "--lora", str(lora)]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments, "--pictures", str(tmp_path / "sheets")])
    evaluate_lcm.main()
    written = json.loads(record.read_text())
    assert written["training"]["steps"] == 3
    assert [row["what"] for row in written["rows"]] == list(kinds)
    sheets = {np.load(path)["pictures"].tobytes() for path in (tmp_path / "sheets").glob("*.npz")}
    assert len(sheets) == 3, "three ways to draw, three pictures"
    page = "".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in table.LCM_TABLES)
    text = table.filled(page, written, table.LCM_TABLES)
    assert text.count("| LCMScheduler ") == 2
    assert "| 3 | 1.0 | 2 | 2 | 20 |" in text
