"""Models by name and by folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import vivace
from vivace.benchmark import Plan
from vivace.errors import UnknownModel
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.models.find import WEIGHTS
from vivace.spec.record import Outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of the user's own, as `save_pretrained` writes it."""
    return Path(shutil.copytree(WEIGHTS / "tiny-sd", tmp_path / "my model"))


def test_names_are_forgiving_about_case() -> None:
    assert find_model(" Tiny-SD ").model == find_model("tiny-sd").model


def test_a_saved_pipeline_is_benched_like_any_other(folder: Path, tmp_path: Path) -> None:
    plan = Plan(rounds=1, repeats=1, max_warmup=1)
    recipes = ["baseline", "steps(2)", "tiny_vae"]
    records = vivace.bench(str(folder), recipes, num_inference_steps=3, plan=plan, store=tmp_path / "s")
    assert records[0].trial.workload.height == 128, "its native size"
    assert records[0].trial.workload.guidance_scale == 7.5, "its pipeline's own"
    assert [r.outcome for r in records] == [Outcome.MEASURED, Outcome.MEASURED, Outcome.UNSUPPORTED]
    assert records[0].trial.model.source == "folder"
    assert records[2].reason == "tiny_vae: no tiny VAE is known for this model's latents"


def test_a_folders_defaults_are_its_pipelines_own(folder: Path) -> None:
    assert find_model(str(folder)).defaults == {
        "height": 128,
        "width": 128,
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
    }
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    (folder / "unet" / "config.json").unlink()
    assert find_model(str(folder)).defaults["num_inference_steps"] == 28
    assert find_model(str(folder)).defaults["width"] == 128, "FLUX's transformers state no size, its VAEs do"
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": None}))
    assert find_model(str(folder)).defaults["width"] == 1024


def test_other_weights_are_another_model(folder: Path) -> None:
    before = find_model(str(folder)).model
    assert before.revision == find_model("tiny-sd").model.revision, "the same files"
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert find_model(str(folder)).model.revision != before.revision


def test_truncated_weights_are_explained(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UnknownModel, match="does not load as a diffusers pipeline"):
        load_pipeline(find_model(str(folder)), "cpu")


def test_pickles_are_never_loaded(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(UnknownModel, match="does not load"):
        load_pipeline(find_model(str(folder)), "cpu")


def test_code_of_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "pipe.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = ["pipe", "Evil"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnknownModel):
        load_pipeline(find_model(str(folder)), "cpu")
    assert not marker.exists()


def test_the_catalogue_is_complete() -> None:
    for entry in CATALOGUE.values():
        assert (WEIGHTS / entry.folder / "model_index.json").is_file()
        assert entry.tiny_vae is None or (WEIGHTS / entry.tiny_vae / "config.json").is_file()
        assert entry.height % entry.size_multiple == entry.width % entry.size_multiple == 0
        assert entry.prompts
