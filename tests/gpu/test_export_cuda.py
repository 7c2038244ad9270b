"""Exported scripts draw on a GPU what vivace draws there. `python -m pytest -m gpu tests/gpu`."""

import contextlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import shrunken
from tests.families import psnr
from vivace.errors import NoEffect, Unsupported
from vivace.models import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.runtime.opening import open_session

pytestmark = pytest.mark.gpu

PROMPT = "a red circle above a blue square"
LEAST_DB = 50
BOTH = [
    "baseline",
    "bf16",
    "bf16@denoiser",
    "fp32+tf32",
    "attention(efficient)",
    "attention(flash)",
    "channels_last",
    "int8",
    "bf16+int8_dynamic",
    "bf16+fp8",
    "bf16+int4",
    "nf4",
    "bf16+quantize(nf4, backend=bitsandbytes)@denoiser,text_encoder",
    "layerwise_casting",
    "tiny_vae",
    "compile",
    "compile(reduce-overhead)",
    "tiny_vae+bf16+compile@denoiser,vae",
    "cuda_graph",
    "offload(model)",
    "offload(sequential)",
    "offload(group, stream=True)",
    "prompt_cache+offload(group)",
    "attention(math)+compile+offload(model)",
]
OWN = {
    "tiny-sd": [
        "guidance(2)",
        "scheduler(dpmpp_2m)",
        "scheduler(ddim)",
        "cfg_cutoff(0.5)",
        "bf16+cfg_cutoff(0.5)+scheduler(pndm)+compile(reduce-overhead)",
    ],
    "tiny-flux": [
        "first_block_cache(0.2)",
        "bf16+first_block_cache(0.2)+compile",
        "first_block_cache(hits=0.5)+compile",
    ],
}


@pytest.fixture(autouse=True)
def _process_set_back() -> Iterator[None]:
    """A script owns its process; these share one. Compiled too often, a forward would silently run uncompiled."""
    torch._dynamo.reset()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def pixels(picture: Any) -> np.ndarray:
    return np.asarray(picture).astype(np.float64) / 255


def with_vivace(model: str, recipe: str, call: dict[str, Any] | None = None) -> np.ndarray:
    session = open_session(find_model(model), resolve(recipe), "cuda", call)
    return pixels(session(PROMPT, generator=torch.Generator("cpu").manual_seed(0)).images[0])


def with_script(folder: Path, model: str, recipe: str, call: dict[str, Any] | None = None) -> np.ndarray:
    text = write_script(find_model(model), resolve(recipe), "cuda", prompt=PROMPT, call=call).text
    (folder / "draw.py").write_text(text)
    with contextlib.chdir(folder):
        runpy.run_path("draw.py")
    with Image.open(folder / "picture.png") as picture:
        return pixels(picture)


@pytest.mark.parametrize(("model", "recipe"), [(model, r) for model in OWN for r in [*BOTH, *OWN[model]]])
def test_it_draws_the_same(model: str, recipe: str, tmp_path: Path) -> None:
    try:
        drawn = with_vivace(model, recipe)
    except (NoEffect, Unsupported) as error:
        pytest.skip(str(error))
    difference = psnr(with_script(tmp_path, model, recipe), drawn)
    print(f"{model} {recipe}: {difference:.1f} dB")
    assert difference >= LEAST_DB


@pytest.mark.parametrize(
    "recipe",
    ["baseline", "bf16", "offload(model)", "offload(group, stream=True)", "channels_last+cfg_cutoff(0.5)"],
)
def test_a_vae_that_is_cast_in_every_call(recipe: str, tmp_path: Path) -> None:
    folder = shrunken.save(shrunken.sdxl(), tmp_path / "sdxl", (None, "fp16"))
    call = {"height": 64, "width": 64, "num_inference_steps": 4}
    drawn = with_vivace(str(folder), recipe, call)
    assert psnr(with_script(tmp_path, str(folder), recipe, call), drawn) >= LEAST_DB


@pytest.mark.parametrize("scheme", ["nf4", "quantize(nf4, backend=bitsandbytes)"])
def test_quantised_weights_come_to_the_gpu_smaller(scheme: str, tmp_path: Path) -> None:
    if "bitsandbytes" in scheme:
        pytest.importorskip("bitsandbytes")
    text = write_script(
        find_model("tiny-flux"), resolve(f"bf16+{scheme}@denoiser,text_encoder_2"), "cuda", prompt=PROMPT
    ).text
    (tmp_path / "draw.py").write_text(text.partition("\nimage = ")[0])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    names = runpy.run_path(str(tmp_path / "draw.py"))
    held = torch.cuda.memory_allocated() - before
    parts = [part for part in names["pipe"].components.values() if isinstance(part, torch.nn.Module)]
    assert all(p.device.type == "cuda" for part in parts for p in (*part.parameters(), *part.buffers()))
    num = sum(p.numel() for part in parts for p in part.parameters())
    assert held < num * 1.2
    assert torch.cuda.max_memory_allocated() - before < num * 1.6, "never two bytes for each weight"


def test_a_script_runs_on_a_gpu_in_a_process_of_its_own(tmp_path: Path) -> None:
    recipe = "tiny_vae+bf16+scheduler(dpmpp_2m)+steps(12)"
    text = write_script(find_model("tiny-sd"), resolve(recipe), "cuda", prompt=PROMPT).text
    (tmp_path / "draw.py").write_text(text)
    subprocess.run([sys.executable, "draw.py"], cwd=tmp_path, check=True)
    with Image.open(tmp_path / "picture.png") as picture:
        assert psnr(pixels(picture), with_vivace("tiny-sd", recipe)) >= LEAST_DB
