"""Families beyond the seeds': found, loaded, drawn and measured; techniques say in words what they cannot do there."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

import vivace
from tests import shrunken
from tests.hub_server import Hub, Repository
from tinyworld import flux
from vivace.architectures.calls import call_defaults, draws_from_text
from vivace.errors import UnusableModel
from vivace.models import find_model, load_pipeline
from vivace.runtime.workloads import checked_request


def pixart() -> Any:
    text = flux.build_t5()
    transformer = PixArtTransformer2DModel(
        sample_size=32,  # the smallest whose aspect ratios the pipeline knows
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=text.config.d_model,
        cross_attention_dim=16,
        in_channels=4,
        out_channels=8,
        use_additional_conditions=False,
    )
    return PixArtSigmaPipeline(
        shrunken.tokenizer(), text, shrunken.vae(), transformer, DPMSolverMultistepScheduler()
    )


def sd3() -> Any:
    text = flux.build_t5()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=text.config.d_model,
        caption_projection_dim=32,
        pooled_projection_dim=64,
    )
    clips = [shrunken.text_encoder(CLIPTextModelWithProjection) for _ in range(2)]
    return StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        shrunken.vae(shift_factor=0.06),
        clips[0],
        shrunken.tokenizer(),
        clips[1],
        shrunken.tokenizer(),
        text,
        shrunken.tokenizer(),
    )


FAMILIES = {"pixart": pixart, "sd3": sd3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("families")
    return {name: shrunken.save(build().to("cpu"), made / name) for name, build in FAMILIES.items()}


@pytest.mark.parametrize(
    ("name", "side", "steps", "guidance"),
    [("pixart", 256, 20, 4.5), ("sd3", 64, 28, 7.0)],
)
def test_it_is_drawn_as_its_own_pipeline_draws(
    folders: dict[str, Path], name: str, side: int, steps: int, guidance: float
) -> None:
    workload = checked_request(str(folders[name]), "baseline").workload
    assert (workload.height, workload.width, workload.num_inference_steps) == (side, side, steps)
    assert workload.guidance_scale == guidance
    pipe = load_pipeline(find_model(str(folders[name])), "cpu")
    call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "height": side, "width": side}
    plain = np.asarray(pipe("a red circle", generator=torch.Generator().manual_seed(0), **call).images)
    session = vivace.load(str(folders[name]), device="cpu")
    ours = session("a red circle", generator=torch.Generator().manual_seed(0), **call)
    assert np.allclose(np.asarray(ours.images), plain, atol=1e-4)


def test_it_comes_from_a_hub_too(client: Hub, folders: dict[str, Path]) -> None:
    client.repositories["org/pixart"] = Repository({"main": folders["pixart"]})
    pipe = load_pipeline(find_model("org/pixart"), "cpu")
    assert type(pipe).__name__ == "PixArtSigmaPipeline"


@pytest.mark.parametrize(
    "name",
    ["FluxKontextPipeline", "SanaPAGPipeline", "Ideogram4Pipeline", "AmusedPipeline", "GlmImagePipeline"],
)
def test_calls_are_read_as_the_installed_diffusers_has_them(name: str) -> None:
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    read = call_defaults(name)
    assert read is not None
    assert list(read) == [each for each in parameters if each not in ("self", "kwargs")]
    for each in ("num_inference_steps", "guidance_scale", "height"):
        default = parameters[each].default if each in parameters else None
        assert read.get(each) == default


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("ChromaPipeline", True),
        ("Kandinsky3Pipeline", True),
        ("StableCascadeCombinedPipeline", True),
        ("FluxImg2ImgPipeline", False),
        ("StableDiffusionControlNetPipeline", False),
        ("WanPipeline", False),
        ("StableAudioPipeline", False),
    ],
)
def test_what_draws_from_text_alone_is_told_by_its_call(name: str, draws: bool) -> None:
    assert draws_from_text(name) is draws


def test_what_is_not_known_of_a_pipeline_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    assert any(
        "does not know PixArtSigmaPipelines" in note for note in find_model(str(folders["pixart"])).notes
    )
    assert find_model(str(folders["sd3"])).notes == ()
    shutil.copytree(folders["sd3"], tmp_path / "newer")
    index = tmp_path / "newer" / "model_index.json"
    content = json.loads(index.read_text()) | {"_class_name": "Flux9Pipeline", "_diffusers_version": "9.1.0"}
    index.write_text(json.dumps(content))
    with pytest.raises(UnusableModel, match=r"Flux9Pipeline, written by diffusers 9.1.0.*FLUX.1"):
        find_model(str(tmp_path / "newer"))
