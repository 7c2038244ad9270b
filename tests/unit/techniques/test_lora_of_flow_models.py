"""LoRAs of the transformers after FLUX.1: merged and hot are one sum, exchanges compile nothing; their layouts."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.lora import write_random
from tests.flow_models import MODELS, draw, pipeline, reference, session

SOME = [
    model if model == "z-image-turbo" else pytest.param(model, marks=pytest.mark.long) for model in MODELS
]


@pytest.mark.parametrize("model", SOME)
@pytest.mark.long
def test_it_is_merged_exchanged_and_left_out(model: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "other")]
    for seed, file in enumerate(files):
        assert write_random(pipeline(model), file, 4, seed) >= 8
    first, other = (file.as_posix() for file in files)
    merged = [draw(session(model, f"lora({file!r})")) for file in (first, other)]
    assert np.abs(merged[0] - reference(model)).max() > 1e-3
    hot = session(model, f"lora({first!r}, hot=True)")
    assert np.allclose(draw(hot), merged[0], atol=1e-4)
    hot.set_lora(other)
    assert np.allclose(draw(hot), merged[1], atol=1e-4)
    hot.set_lora(scale=0)
    assert np.array_equal(draw(hot), reference(model))
    rides = session(
        model, f"lora({first!r}, hot=True)+quantize(int8)+compile(blocks=repeated, backend=eager)"
    )
    before = draw(rides)
    graphs = rides.evidence()["compiled_graphs"]
    rides.set_lora(other)
    assert not np.array_equal(draw(rides), before)
    assert rides.evidence()["compiled_graphs"] == graphs


def renamed(file: Path, old: str, new: str) -> str:
    path = file.with_name("renamed.safetensors")
    save_file({key.replace(old, new, 1): value for key, value in load_file(file).items()}, path)
    return path.as_posix()


def test_comfyui_s_and_peft_s_names_mean_the_same_layers(tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    write_random(pipeline("z-image-turbo"), file, 4, 0)
    expected = draw(session("z-image-turbo", f"lora({file.as_posix()!r})"))
    comfy = renamed(file, "transformer.", "diffusion_model.")
    assert np.array_equal(draw(session("z-image-turbo", f"lora({comfy!r})")), expected)
    peft = renamed(file, "transformer.", "base_model.model.")
    loaded = session("z-image-turbo", f"lora({peft!r})")
    assert np.array_equal(draw(loaded), expected)
    assert any("alpha is assumed to be the rank" in warning for warning in loaded.warnings)
    write_random(pipeline("sana-1600m"), file, 4, 0)
    comfy = renamed(file, "transformer.", "diffusion_model.")
    expected = draw(session("sana-1600m", f"lora({file.as_posix()!r})"))
    assert np.array_equal(draw(session("sana-1600m", f"lora({comfy!r})")), expected)
