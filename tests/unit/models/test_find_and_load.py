"""Models by name and by folder."""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.narrow import FLOW
from vivace.architectures import pipeline_named
from vivace.errors import UnknownModel, UnusableModel
from vivace.models import CATALOGUE, Embedded, find_model, load_pipeline
from vivace.models.find import WEIGHTS
from vivace.models.prompts import PROMPT_SETS
from vivace.runtime.workloads import checked_request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of the user's own, as `save_pretrained` writes it."""
    return Path(shutil.copytree(WEIGHTS / "tiny-sd", tmp_path / "my model"))


def test_names_are_forgiving_about_case() -> None:
    assert find_model(" Tiny-SD ").model == find_model("tiny-sd").model


def test_a_folders_defaults_are_its_pipelines_own(folder: Path) -> None:
    config = folder / "unet" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"layers_per_block": 2}))  # else its denoiser is known,
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")  # or its weights
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


def test_a_folder_with_other_weights_is_another_model(folder: Path) -> None:
    before = find_model(str(folder)).model
    assert before.revision == find_model("tiny-sd").model.revision, "the same files"
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert find_model(str(folder)).model.revision != before.revision


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda whole: whole[:-1], r"is truncated: [\d,]+ bytes, not [\d,]+; copy or download it again"),
        (lambda whole: whole[:1000], "is truncated: 1,000 bytes, less than its header"),
        (lambda whole: whole + b"x", "is longer than its header says"),
        (lambda whole: b"", "is empty"),
        (
            lambda whole: b"version https://git-lfs.github.com/spec/v1",
            "is not a safetensors file, or is damaged",
        ),
        (lambda whole: whole[:8] + b"[" + whole[9:], "is not a safetensors file, or is damaged"),
    ],
)
def test_damaged_weights_are_named_before_anything_is_loaded(folder: Path, content: Any, says: str) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(content(weights.read_bytes()))
    with pytest.raises(UnusableModel, match=r"unet/diffusion_pytorch_model\.safetensors " + says):
        checked_request(str(folder), "baseline")


def test_weights_of_another_network_are_explained(folder: Path) -> None:
    config = folder / "unet" / "config.json"
    config.write_text(config.read_text().replace('"cross_attention_dim": ', '"cross_attention_dim": 1'))
    with pytest.raises(
        UnusableModel, match=r"my model/unet/\S+ has down_blocks\.0\.\S+ with the shape \[64, 128\]"
    ):
        load_pipeline(find_model(str(folder)), "cpu")


def test_pickles_are_never_loaded(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(
        UnusableModel, match=r"no safetensors for its unet, only diffusion_pytorch_model\.bin"
    ):
        checked_request(str(folder), "baseline")
    weights.with_suffix(".bin").unlink()
    with pytest.raises(UnusableModel, match="has no weights for its unet"):
        load_pipeline(find_model(str(folder)), "cpu")


def test_code_of_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "pipe.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"unet": ["pipe", "Evil"]}))
    with pytest.raises(UnusableModel, match=r"its own code \(pipe.py for its unet\)"):
        find_model(str(folder))
    (folder / "pipe.py").rename(folder / "unet" / "pipe.py")
    with pytest.raises(UnusableModel, match="its own code"):
        find_model(str(folder))
    (folder / "unet" / "pipe.py").rename(folder / "pipeline.py")
    with pytest.raises(UnusableModel):
        load_pipeline(find_model(str(folder)), "cpu")
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": ["pipeline", "Evil"]}))
    with pytest.raises(UnusableModel, match="runs no code from models"):
        find_model(str(folder))
    (folder / "model_index.json").write_text(json.dumps(index))
    config = folder / "text_encoder" / "config.json"
    own = {"auto_map": {"AutoModel": "pipeline.Evil"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    with pytest.raises(UnusableModel, match=r"auto_map in text_encoder/config.json"):
        find_model(str(folder))
    assert not marker.exists()


def test_a_modular_pipeline_is_refused_by_its_name(tmp_path: Path) -> None:
    index = {"_class_name": "Flux3KleinModularPipeline", "_diffusers_version": "0.42.1"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnusableModel, match=r"is a Flux3KleinModularPipeline: a modular pipeline"):
        find_model(str(tmp_path))


def test_folders_that_are_no_model(folder: Path, tmp_path: Path) -> None:
    index = folder / "model_index.json"
    text = index.read_text()
    for content, says in (
        ("{", "is not a diffusers pipeline's index"),
        ("[]", "is not a diffusers pipeline's index"),
        (
            text.replace("StableDiffusionPipeline", "StableVideoDiffusionPipeline"),
            "is not a text-to-image pipeline",
        ),
        (
            text.replace("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline"),
            "is not a text-to-image",
        ),
    ):
        index.write_text(content)
        with pytest.raises(UnusableModel, match=says):
            find_model(str(folder))
    index.unlink()
    with pytest.raises(
        UnusableModel, match=r"has no model_index.json; give the folder that pipe.save_pretrained"
    ):
        find_model(str(folder))


def test_a_folder_with_one_variant_alone(folder: Path) -> None:
    expected = load_pipeline(find_model(str(folder)), "cpu")
    for path in list(folder.rglob("*.safetensors")):
        path.rename(path.with_suffix(".fp16.safetensors"))
    pipe = load_pipeline(find_model(str(folder)), "cpu")
    assert torch.equal(pipe.unet.conv_in.weight, expected.unet.conv_in.weight)
    assert pipe.dtype == torch.float32


def test_mistyped_names() -> None:
    for name, says in (
        ("sxdl", "no model 'sxdl'; did you mean 'sdxl'"),
        ("flux_dev", "did you mean 'flux-dev'"),
        ("./nowhere", "./nowhere: there is no such file or folder"),
        ("org/model@", "no model"),
        ("org/model/unet", "there is no such file or folder"),
        ("-a/b", "no model"),
        ("", "in the catalogue: tiny-sd, tiny-flux, tiny-flux-schnell, tiny-z-image, sd15, sdxl"),
        ("a\0b", "no model"),
    ):
        with pytest.raises(UnknownModel, match=re.escape(says)):
            find_model(name)


def test_the_catalogue_is_complete() -> None:
    names = [
        "tiny-sd",
        "tiny-flux",
        "tiny-flux-schnell",
        "sd15",
        "sdxl",
        "sdxl-turbo",
        "sdxl-lightning-2step",
        "sdxl-lightning-4step",
    ]
    names += ["hyper-sdxl-4step", "lcm-sdxl", "pony", "playground", "flux-dev", "flux-schnell"]
    assert set(names) <= set(CATALOGUE)
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.height % entry.size_multiple == entry.width % entry.size_multiple == 0
        assert max(entry.height, entry.width) <= entry.max_size
        assert pipeline_named(entry.pipeline) is not None
        assert entry.prompt_set in PROMPT_SETS
        if entry.scheduler is not None:
            kind = getattr(diffusers, entry.scheduler.class_name)
            assert set(entry.scheduler.overrides) <= set(inspect.signature(kind).parameters)
        if isinstance(entry.origin, Embedded):
            assert (WEIGHTS / entry.origin.folder).is_dir()
            assert (WEIGHTS / (entry.origin.base or entry.origin.folder) / "model_index.json").is_file()
            assert entry.scorer is not None
            assert (WEIGHTS / entry.scorer / "model.safetensors").is_file()
            assert (
                entry.origin.tiny_vae is None or (WEIGHTS / entry.origin.tiny_vae / "config.json").is_file()
            )
            continue
        parts = [*entry.origin.parts.values(), entry.origin.lora, entry.origin.tiny_vae]
        revisions = [entry.origin.revision, *(part.revision for part in parts if part)]
        if name not in (*FLOW, "flux-kontext"):  # whose commits are not known
            assert all(re.fullmatch("[0-9a-f]{40}", revision or "") for revision in revisions), "pinned"
        assert {
            file for part in parts if part for file in part.files if file.endswith((".bin", ".pt"))
        } == set()
        assert entry.origin.download_bytes is not None
