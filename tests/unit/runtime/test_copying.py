"""Copies of a session's pipeline, and what `save_pretrained` writes of it: right, or refused in words."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

import vivace
from tests.contract.test_technique_contract import ALL, RECIPES
from tests.families import build, load
from vivace.errors import NoEffect, Unsupported

FIRST = {name: next(recipe for technique, recipe in RECIPES if technique == name) for name in ALL} | {
    "dtype": "bf16",
    "compile": "compile(backend=eager)",
    "prune": "prune(0.1, pictures=1)",
}


def drawn(pipe: Any) -> np.ndarray:
    """Return what a call of the pipeline draws, without the session."""
    torch.set_num_threads(1)
    call = {"num_inference_steps": 2, "height": 32, "width": 32, "guidance_scale": 5.0, "output_type": "np"}
    return np.asarray(pipe("a red circle", generator=torch.Generator().manual_seed(0), **call).images)


def _halve(network: torch.nn.Module) -> None:
    with torch.no_grad():
        for weight in network.parameters():
            if (
                type(weight) is torch.nn.Parameter
                and weight.is_floating_point()
                and weight.dtype.itemsize > 1
            ):
                weight.mul_(0.5)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"parallel", "prune"}))
@pytest.mark.slow(
    "gpu_postprocess", "guidance", "scheduler", "steps", "tf32", "vae_slicing", "cfg_cutoff", "inference_mode"
)
def test_a_copy_computes_with_its_own_weights(name: str) -> None:
    try:
        session = vivace.apply(build("sd"), FIRST[name], prompts=["a red circle"])
    except (Unsupported, NoEffect) as error:
        pytest.skip(str(error))
    try:
        copied = copy.deepcopy(session.pipe)
    except Unsupported as error:
        assert "vivace.apply(copy.deepcopy(pipe), recipe)" in str(error)
        with pytest.raises(Unsupported):
            copy.deepcopy(session.pipe.unet)
        return
    if name == "progressive_resolution":
        return  # a call of the pipeline beside the session is refused
    before = drawn(copied)
    for part in ("unet", "vae", "text_encoder"):
        # Of a copy each, so that what one lacks the others do not hide.
        other = copy.deepcopy(copied)
        _halve(getattr(other, part))
        assert np.abs(drawn(other) - before).max() > 0.05, part
    assert np.array_equal(drawn(session.pipe), before)


def test_of_a_loaded_model_too() -> None:
    session = vivace.load("tiny-sd", "bf16+prompt_cache+vae_tiling(64)+attention(math)", device="cpu")
    copied = copy.deepcopy(session.pipe)
    assert copied.encode_prompt.__wrapped__.__self__ is copied
    _halve(copied.vae)
    assert np.abs(drawn(copied) - drawn(session.pipe)).max() > 0.05
    with pytest.raises(Unsupported, match="a session cannot be copied"):
        copy.deepcopy(session)


CHANGED = ["fuse_qkv", "fused@denoiser,vae", "quantize(int8)", "quantize(q8_0, backend=gguf)@vae", "hot"]


@pytest.mark.parametrize("recipe", CHANGED)
def test_save_pretrained_writes_nothing_that_diffusers_cannot_read(recipe: str, tmp_path: Path) -> None:
    pipe = build("sd")
    if recipe == "hot":
        from tests.lora_files import write_lora

        recipe = f"lora('{write_lora(pipe, tmp_path / 'lora.safetensors', 2)}', hot=True)"
    try:
        session = vivace.apply(pipe, recipe)
    except Unsupported as error:
        pytest.skip(str(error))
    for owner in (session.pipe, session.pipe.vae if "vae" in recipe else session.pipe.unet):
        with pytest.raises(Unsupported, match=r"diffusers cannot read.*vivace save"):
            owner.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_removed_blocks_are_not_saved_under_their_former_configuration(tmp_path: Path) -> None:
    pipe = build("sd")
    pipe.unet.down_blocks[0].attentions[0].transformer_blocks = torch.nn.ModuleList()
    session = vivace.apply(pipe, "steps(3)")
    with pytest.raises(Unsupported, match=r"transformer_blocks.*vivace save"):
        session.pipe.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("model", ["tiny-sd", "tiny-flux"])
def test_what_keeps_its_layout_is_saved(model: str, tmp_path: Path) -> None:
    session = vivace.apply(
        load(model), "bf16+channels_last+steps(3)" if model == "tiny-sd" else "bf16+steps(3)"
    )
    session.pipe.save_pretrained(tmp_path, variant="bf16")
    assert list(tmp_path.rglob("*.bf16.safetensors")), "arguments reach diffusers"
    read = DiffusionPipeline.from_pretrained(tmp_path, variant="bf16", torch_dtype=torch.bfloat16)
    name = "unet" if model == "tiny-sd" else "transformer"
    for key, weight in getattr(read, name).state_dict().items():
        assert torch.equal(weight, getattr(session.pipe, name).state_dict()[key]), key
