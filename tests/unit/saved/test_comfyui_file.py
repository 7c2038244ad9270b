"""A denoiser in one file for ComfyUI: what is in it, and that read back it draws what its recipe draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.typed import typed
from vivace.errors import OutputError, Unsupported, UsageError
from vivace.models.checkpoints.headers import read_header, read_metadata
from vivace.models.checkpoints.read_denoiser import original_layout, read_denoiser
from vivace.models.checkpoints.single_file import contents_of
from vivace.models.checkpoints.weight_scales import codes_of
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.denoiser_file import DenoiserFile, WrittenDenoiser, write_denoiser
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session

LORA = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def written(model: str, recipe: str, path: Path) -> WrittenDenoiser:
    return write_denoiser(find_model(model), resolve(recipe), "cpu", path)


def opened(model: str, recipe: str = "baseline") -> Session:
    return open_session(find_model(model), resolve(recipe), "cpu")


def read_into(session: Session, path: Path) -> Session:
    """Give a session's denoiser the weights of a file, as the reader of single files makes them."""
    unet = getattr(session.pipe, "unet", None)
    denoiser = session.pipe.transformer if unet is None else unet
    header = read_header(path)
    names = {name: name.removeprefix(PREFIX) for name in header if name not in ("v_pred", "ztsnr")}
    codes = codes_of(path, header, read_metadata(path))
    state = read_denoiser(path, names, codes, denoiser, denoiser.dtype)
    denoiser.load_state_dict(state, strict=True)
    return session


def drawn(session: Session) -> np.ndarray[Any, Any]:
    generator = torch.Generator("cpu").manual_seed(3)
    size = {"height": 64, "width": 64}
    return np.asarray(session("a red circle", generator=generator, num_inference_steps=2, **size).images[0])


def with_plain_weights(session: Session) -> Session:
    """Dequantise torchao's weights of a UNet, once."""
    for layer in session.pipe.unet.modules():
        if hasattr(getattr(layer, "weight", None), "qdata"):
            layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return session


def test_read_back_it_draws_what_the_recipe_draws(tmp_path: Path) -> None:
    recipe = f"lora('{LORA}')+bf16+quantize(fp8_weight, granularity=tensor, skip='*.attn1.*')"
    file = written("tiny-sd", recipe, tmp_path / "unet.safetensors")
    assert str(LORA.parent).encode() not in file.path.read_bytes(), "files for ComfyUI are published"
    assert f"lora({LORA.name}" in read_metadata(file.path)["vivace"]
    afresh = opened("tiny-sd", recipe)
    assert file.num_quantised == afresh.effects["quantize@denoiser"]["denoiser.quantized_layers"]
    session = read_into(opened("tiny-sd", "bf16"), file.path)
    read_back = drawn(session)
    # torchao adds biases after rounding, so the last bits of its images differ from those of the same plain weights.
    assert np.abs(read_back.astype(int) - drawn(afresh).astype(int)).mean() < 1
    own, read = with_plain_weights(afresh), session.pipe.unet.state_dict()
    assert all(torch.equal(read[name], value) for name, value in own.pipe.unet.state_dict().items())
    assert np.array_equal(read_back, drawn(own))
    assert not np.array_equal(read_back, drawn(opened("tiny-sd", "bf16")))


def test_what_is_in_the_file(tmp_path: Path) -> None:
    file = written("tiny-flux", "bf16+quantize(fp8_weight)+compile", tmp_path / "flux.safetensors")
    state = load_file(file.path)
    qkv = state["double_blocks.0.img_attn.qkv.weight"]
    assert qkv.dtype == torch.float8_e4m3fn
    assert state["double_blocks.0.img_attn.qkv.weight_scale"].shape == ()
    description = bytes(state["double_blocks.0.img_attn.qkv.comfy_quant"].tolist())
    assert json.loads(description) == {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    assert state["double_blocks.0.img_attn.norm.key_norm.scale"].dtype == torch.bfloat16
    attention = opened("tiny-flux", "bf16").pipe.transformer.transformer_blocks[0].attn
    own = torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]).float()
    values = qkv.float() * state["double_blocks.0.img_attn.qkv.weight_scale"]
    assert float((values - own).norm() / own.norm()) < 0.04
    assert float(values.abs().max()) == pytest.approx(float(own.abs().max()), rel=4e-3)
    about = json.loads(read_metadata(file.path)["vivace"])
    assert (about["model"], "fp8_weight" in about["recipe"]) == ("tiny-flux", True)
    notes = " ".join(file.notes)
    assert "not in a file of the denoiser's weights: compile" in notes
    assert "double_blocks.*.img_attn.qkv.weight (2)" in notes
    contents = contents_of(file.path)
    assert (contents.entry, contents.component, len(contents.codes)) == ("flux-dev", "transformer", 45)
    assert drawn(read_into(opened("tiny-flux"), file.path)).any()


def test_fp8_matmuls_are_left_to_comfyui(tmp_path: Path) -> None:
    file = written("tiny-sd", "quantize(fp8)+tiny_vae", tmp_path / "unet.safetensors")
    descriptions = [value for name, value in load_file(file.path).items() if name.endswith(".comfy_quant")]
    assert {bytes(value.tolist()) for value in descriptions} == {b'{"format": "float8_e4m3fn"}'}
    assert any("clipped at 448" in note for note in file.notes)
    assert any("tiny_vae" in note for note in file.notes)
    assert all(name.startswith(PREFIX) for name in load_file(file.path) if name != "v_pred")


def test_calibrated_scales_of_inputs_are_written_and_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = "quantize(fp8_static, pictures=1)"
    file = written("tiny-flux", recipe, tmp_path / "flux.safetensors")
    state = load_file(file.path)
    scales = {name: value for name, value in state.items() if name.endswith(".input_scale")}
    assert len(scales) == file.num_quantised > 0
    assert all(value.shape == () and float(value) > 0 for value in scales.values())
    afresh = opened("tiny-flux", recipe).pipe.transformer.transformer_blocks[0].attn
    own = [float(getattr(afresh, name).weight.act_quant_scale) for name in ("to_q", "to_k", "to_v")]
    assert float(scales["double_blocks.0.img_attn.qkv.input_scale"]) == pytest.approx(max(own), rel=1e-5)
    assert any("scales of inputs: " in note for note in file.notes)
    assert not any("clipped at 448" in note for note in file.notes)
    assert drawn(read_into(opened("tiny-flux"), file.path)).any()


def test_without_quantize_it_has_plain_weights(tmp_path: Path) -> None:
    file = written("tiny-sd", "bf16", tmp_path / "unet.safetensors")
    state = load_file(file.path)
    assert {state[name].dtype for name in state if name != "v_pred"} == {torch.bfloat16}
    assert file.num_quantised == 0


def test_a_weight_of_which_some_layers_are_quantised_stays_as_it_is(tmp_path: Path) -> None:
    file = written(
        "tiny-flux",
        "quantize(fp8_weight, skip='transformer_blocks.*.attn.to_q')",
        tmp_path / "flux.safetensors",
    )
    state = load_file(file.path)
    assert state["double_blocks.1.img_attn.qkv.weight"].dtype != torch.float8_e4m3fn
    assert state["double_blocks.1.txt_attn.qkv.weight"].dtype == torch.float8_e4m3fn
    assert any(
        "double_blocks.*.img_attn.qkv.weight (2)" in note for note in file.notes if "not in fp8" in note
    )


def test_a_model_that_predicts_v_is_marked(tmp_path: Path) -> None:
    pipe: Any = opened("tiny-sd").pipe
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert not pipe.scheduler.config.get("rescale_betas_zero_snr")
    markers = read_header(written("tiny-sd", "bf16", tmp_path / "unet.safetensors").path).keys()
    assert ("v_pred" in markers, "ztsnr" in markers) == (True, False)
    assert "v_pred" not in read_header(written("tiny-flux", "bf16", tmp_path / "flux.safetensors").path)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("quantize(int8)", "written in fp8 only"),
        ("quantize(fp8, skip=auto)", "skip=auto is measured by"),
        (f"lora('{LORA}', hot=True)", "merge it"),
        ("prune(0.3)", "all of its blocks"),
        ("quantize(fp8, min_weights=100000000)", "quantises no layer of the denoiser"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(recipe: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=says):
        written("tiny-sd", recipe, tmp_path / "unet.safetensors")
    assert not list(tmp_path.iterdir())


def test_names_that_are_not_known_are_refused() -> None:
    import diffusers

    other = diffusers.SanaTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, num_cross_attention_heads=2,
        cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, sample_size=8,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="in a SanaTransformer2DModel is not known"):
        DenoiserFile.of(other, ())
    assert type(other).__name__ == "SanaTransformer2DModel"


def test_an_existing_file_and_other_names_are_refused(tmp_path: Path) -> None:
    taken_path = tmp_path / "unet.safetensors"
    taken_path.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists and was not changed"):
        written("tiny-sd", "bf16", taken_path)
    assert taken_path.read_bytes() == b"mine"
    with pytest.raises(UsageError, match=r"does not end in \.safetensors"):
        written("tiny-sd", "bf16", tmp_path / "unet.ckpt")
    with pytest.raises(UsageError, match="random weights"):
        written("synthetic:sd15", "bf16", tmp_path / "other.safetensors")


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "unet.safetensors"
    command = ["save", "tiny-sd", str(path), "--recipe", "quantize(fp8_weight)", "--format", "comfyui"]
    assert typed(monkeypatch, *command, "--device", "cpu") == 0
    output = capsys.readouterr()
    assert f"wrote {path}: the denoiser of tiny-sd, " in output.out
    assert "one scale, as the format wants" in output.err
    layout = original_layout(opened("tiny-sd").pipe.unet)
    assert {PREFIX + name for name in layout} <= load_file(path).keys()
