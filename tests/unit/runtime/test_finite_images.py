"""A call that computes NaN or infinity has no image: it is an error in words, wherever the image would have gone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vivace
from tests import shrunken
from tests.typed import run_vivace
from vivace.benchmark import Timing
from vivace.entry_points import apply
from vivace.errors import NotFinite
from vivace.runtime.finite_images import EmptyImageWarning
from vivace.serve.worker.pixels import Projection

SMALL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2}


def pipe_with(part: str, value: float) -> Any:
    """Return a pipeline, one weight of whose denoiser or VAE has this value."""
    pipe = shrunken.sd15()
    pipe.set_progress_bar_config(disable=True)
    weight = pipe.unet.conv_out.weight if part == "unet" else pipe.vae.decoder.conv_out.bias
    with torch.no_grad():
        weight.view(-1)[0] = value
    return pipe


@pytest.mark.parametrize("part", ["unet", "vae"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_session_refuses_every_kind_of_output(part: str, value: float) -> None:
    pipe = pipe_with(part, value)
    session = apply(pipe)
    before = set(vars(pipe.vae)), set(vars(pipe.image_processor))
    for kind in ("pil", "np", "pt", *(["latent"] if part == "unet" else [])):
        with pytest.raises(NotFinite, match="NaN or infinity"):
            session("a red circle", output_type=kind, **SMALL)
    with pytest.raises(NotFinite):
        session("a red circle", return_dict=False, **SMALL)
    assert (set(vars(pipe.vae)), set(vars(pipe.image_processor))) == before, "the pipeline is as it was"


def test_a_finite_image_of_one_colour_is_a_warning() -> None:
    pipe = pipe_with("vae", 0.0)
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.zero_()
    with pytest.warns(EmptyImageWarning, match="1 of 1 images of this call have one colour"):
        apply(pipe)("a red circle", **SMALL)


def test_generate_writes_no_file_and_bench_measures_nothing(tmp_path: Path) -> None:
    folder = str(shrunken.save(pipe_with("unet", float("nan")), tmp_path / "model"))
    size = ["--height", "64", "--width", "64", "--num-inference-steps", "2", "--device", "cpu"]
    done = run_vivace(tmp_path, "generate", "a red circle", "--model", folder, *size, code=3)
    assert "not finite" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.png"))
    timing = Timing(rounds=1, repeats=1, max_warmup=1)
    ran = vivace.bench(
        folder, ["baseline"], prompts=["a"], timing=timing, store=tmp_path / "store", device="cpu", **SMALL
    )
    (row,) = ran.rows()
    assert "not finite" in json.dumps([round_.reason for round_ in row.record.rounds])
    assert row.latency is None


def test_a_partial_image_of_nan_is_refused() -> None:
    projection = Projection(None, np.zeros((5, 3), np.float32), 1.0)
    assert isinstance(projection.image(torch.zeros(1, 4, 8, 8), 64, 64), Image.Image)
    with pytest.raises(NotFinite):
        projection.image(torch.full((1, 4, 8, 8), float("nan")), 64, 64)
