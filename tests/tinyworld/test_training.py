"""Training on a CPU at toy settings: it resumes, survives a kill, and its stages fit together."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tinyworld import (
    loop,
    networks,
    train_sd,
    train_tiny_vae,
    train_vae,
)  # fmt: skip

pytestmark = pytest.mark.long  # how the embedded models came to be, not what vivace does


def small_training(checkpoint, budget):
    """Fit a small network to a fixed function; the loss falls steadily from about 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))

    def loss():
        x = torch.randn(64, 4)
        error = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        return error, torch.zeros(0)

    return loop.Loop(
        "small",
        {"model": model},
        loss,
        figures=(),
        rate=1e-2,
        budget=budget,
        checkpoint=checkpoint,
        warm_up=5,
    )


KILLED = """
import pathlib, sys
sys.path.insert(0, ".")
from tests.tinyworld.test_training import small_training
from tinyworld import loop

budget = loop.Budget(steps=100_000, save_every_s=0.0, print_every_s=1e9)
small_training(pathlib.Path(sys.argv[1]), budget).run()
"""


@pytest.mark.soak
def test_a_killed_training_goes_on(tmp_path):
    checkpoint = tmp_path / "small.pt"
    fresh = small_training(checkpoint, loop.Budget(steps=20))
    start = fresh.run()["loss"]
    assert fresh.step == 20

    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(checkpoint)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
        if torch.load(checkpoint, weights_only=True)["step"] >= 320:
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL

    kept = torch.load(checkpoint, weights_only=True)  # whole, whenever the kill came
    assert kept["step"] >= 320
    assert {value.dtype for value in kept["first"].values()} == {torch.bfloat16}
    assert {value.dtype for value in kept["weights"].values()} == {torch.float32}
    resumed = small_training(checkpoint, loop.Budget(steps=kept["step"] + 20))
    assert resumed.step == kept["step"]
    assert resumed.elapsed_s == kept["elapsed_s"]
    for key, value in resumed.parameters.items():
        assert torch.equal(value, kept["weights"][key])
        assert torch.equal(resumed.optimizer.state[value]["exp_avg_sq"], kept["second"][key].float())
    after = resumed.run()["loss"]
    assert resumed.step == kept["step"] + 20
    assert after < 0.7 * start, "it goes on from where it was, not from the start"


def test_a_run_stops_early_and_its_budget_spans_runs(tmp_path, monkeypatch):
    checkpoint = tmp_path / "small.pt"
    monkeypatch.setattr(loop, "_STARTED", time.perf_counter())
    first = small_training(checkpoint, loop.Budget(minutes=2 / 60, stop_s=0.5))
    first.run()
    assert not first.finished
    assert 0.4 < first.elapsed_s < 1.9
    second = small_training(checkpoint, loop.Budget(minutes=2 / 60))
    assert second.elapsed_s == first.elapsed_s
    second.run()
    assert second.finished
    assert second.rate_now.item() < 0.01 * second.rate


def test_a_loss_that_blows_up_is_not_hidden(tmp_path):
    training = small_training(tmp_path / "small.pt", loop.Budget(steps=3))
    training.loss = lambda: (training.values[0].sum() * float("nan"), torch.zeros(0))
    with pytest.raises(FloatingPointError, match="small"):
        training.run()
    assert not (tmp_path / "small.pt").exists()


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs a training's main at toy settings."""

    def run(module, *more):
        toy = ["--out", str(tmp_path), "--steps", "2", "--scenes", "8", "--batch", "2", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["train", *toy, *more])
        module.main()

    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.soak
def test_the_stages_fit_together(tmp_path, train):
    from diffusers import AutoencoderTiny, StableDiffusionPipeline

    for module in (train_vae, train_tiny_vae, train_sd):
        train(module)
    before = torch.load(tmp_path / "sd.pt", weights_only=True)
    train(train_sd)  # a finished training, started again, is a finished training
    assert torch.load(tmp_path / "sd.pt", weights_only=True)["step"] == before["step"] == 2

    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / networks.SD_FOLDER)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae = AutoencoderTiny.from_pretrained(tmp_path / networks.TINY_VAE_FOLDER)
    assert pipe("a red circle", num_inference_steps=1).images[0].size == (128, 128)

    folder = tmp_path / networks.SD_FOLDER
    (tmp_path / "sd.pt").unlink()
    train(train_sd, "--start-from", str(folder), "--steps", "1")
    moved = torch.load(tmp_path / "sd.pt", weights_only=True)["weights"]
    close = [torch.allclose(moved[key], before["ema"][key], atol=2e-3) for key in moved]
    assert all(close), "it starts from the folder's weights, not from random ones"


@torch.no_grad()
def test_whitening_changes_the_latents_and_not_the_pictures():
    torch.manual_seed(0)
    vae = networks.build_vae().eval()
    picture = torch.rand(2, 3, 128, 128) * 2 - 1
    before = vae.encode(picture).latent_dist
    drawn = vae.decode(before.mean).sample
    mean, std = torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([0.5, 2.0, 1.0, 3.0])
    networks.whiten(vae, mean, std)
    after = vae.encode(picture).latent_dist
    expected = (before.mean - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(after.mean, expected, atol=1e-5)
    assert torch.allclose(after.std, before.std / std[:, None, None], rtol=1e-4)
    assert torch.allclose(vae.decode(after.mean).sample, drawn, atol=1e-4)
