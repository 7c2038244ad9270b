"""A model that shares another's components: its own are loaded in their place, by diffusers' classes only."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny

import vivace
from tinyworld import flux, networks
from vivace.errors import UnusableModel
from vivace.models import CATALOGUE, find, find_model, load_pipeline

PROMPT = "a red circle above a blue square"


def draw(pipe: Any, **arguments: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe(PROMPT, generator=generator, output_type="np", **arguments).images)


@pytest.fixture
def own_copy(flux_family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights that a test may change."""
    copy = Path(shutil.copytree(flux_family, tmp_path / "weights"))
    monkeypatch.setattr(find, "WEIGHTS", copy)
    return copy


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def set_class(folder: Path, name: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": name}))


def test_put_together_it_draws_what_the_trained_pipeline_draws(flux_family: Path) -> None:
    session = vivace.load("tiny-flux-schnell", device="cpu")
    plain = flux.load_schnell(flux_family)
    plain.set_progress_bar_config(disable=True)
    expected = draw(plain, num_inference_steps=2, guidance_scale=0.0, **flux.CALL)
    assert np.array_equal(draw(session), expected)
    assert not session.pipe.transformer.config.guidance_embeds, "its own transformer"
    base = draw(vivace.load("tiny-flux", device="cpu"), num_inference_steps=2, guidance_scale=0.0)
    assert not np.array_equal(base, expected)


def test_the_pipeline_is_told_how_many_tokens_prompts_have(flux_family: Path) -> None:
    session = vivace.load("tiny-flux", device="cpu")
    lengths = []
    session.pipe.transformer.register_forward_pre_hook(
        lambda module, args, arguments: lengths.append(arguments["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    draw(session, num_inference_steps=1)
    draw(session, num_inference_steps=1, max_sequence_length=16)
    assert lengths == [32, 16], "the catalogue's, unless the caller says otherwise"


def test_a_model_is_as_large_as_all_that_it_loads(flux_family: Path) -> None:
    base, fast = find_model("tiny-flux").files, find_model("tiny-flux-schnell").files
    assert list(base) == list(fast)
    differ = [name for name in base if base[name] != fast[name]]
    assert differ == ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"]


def test_of_a_replaced_component_no_file_is_left(own_copy: Path) -> None:
    (own_copy / "tiny-flux" / "transformer" / "more.safetensors").write_bytes(b"a second shard of the base's")
    assert "transformer/more.safetensors" in find_model("tiny-flux").files
    assert "transformer/more.safetensors" not in find_model("tiny-flux-schnell").files


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("tiny-flux/vae/diffusion_pytorch_model.safetensors", {"tiny-flux", "tiny-flux-schnell"}),
        ("tiny-flux/transformer/diffusion_pytorch_model.safetensors", {"tiny-flux"}),
        ("tiny-flux-schnell/transformer/diffusion_pytorch_model.safetensors", {"tiny-flux-schnell"}),
    ],
)
def test_the_fingerprint_covers_what_is_loaded_and_nothing_else(
    own_copy: Path, file: str, changed: set[str]
) -> None:
    before = {name: find_model(name).model.revision for name in CATALOGUE}
    flip_last_byte(own_copy / file)
    assert {name for name in CATALOGUE if find_model(name).model.revision != before[name]} == changed


def test_a_component_of_another_class_replaces_the_bases(own_copy: Path) -> None:
    networks.save_tiny_vae(own_copy / "tiny-flux-schnell" / "vae", networks.build_tiny_vae(flux.CHANNELS))
    pipe = load_pipeline(find_model("tiny-flux-schnell"), "cpu")
    assert isinstance(pipe.vae, AutoencoderTiny)
    assert pipe.vae.dtype == torch.float32


@pytest.mark.parametrize("name", ["Evil", "logging", "FluxPipeline", ["evil.py", "Evil"], None])
def test_only_diffusers_own_model_classes_are_loaded(own_copy: Path, name: object) -> None:
    folder = own_copy / "tiny-flux-schnell" / "transformer"
    marker = own_copy / "ran"
    (folder / "evil.py").write_text(f"open({os.fspath(marker)!r}, 'w')\nclass Evil: pass\n")
    set_class(folder, name)
    with pytest.raises(UnusableModel, match=r"config\.json names"):
        load_pipeline(find_model("tiny-flux-schnell"), "cpu")
    assert not marker.exists()
