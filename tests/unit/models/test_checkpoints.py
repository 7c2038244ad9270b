"""What single files of weights have: what they predict, scales beside weights, and which model they are."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vivace
from tests import shrunken
from tests.hub_server import Hub
from tests.original_layout import save_sd2, save_sd15, save_sdxl
from tests.typed import run_vivace
from vivace.architectures import CATALOGUE, FAMILIES
from vivace.architectures.family import Signature
from vivace.architectures.others import CONFUSABLE, OTHERS
from vivace.errors import UnusableModel, UsageError
from vivace.models import find_model, load_pipeline
from vivace.models.checkpoints.signatures import TensorNames, signature_of
from vivace.models.checkpoints.single_file import contents_of
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script

State = dict[str, torch.Tensor]
UNET = "model.diffusion_model."
LAYER = UNET + "input_blocks.1.1.transformer_blocks.0.attn2.to_q"
FP8 = torch.float8_e4m3fn


@pytest.fixture
def pipe() -> Any:
    return shrunken.sd15()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SD 1.5's layout beside its configuration."""
    pipe = shrunken.sd15()
    folder = shrunken.save(pipe, tmp_path_factory.mktemp("sd15") / "folder")
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    save_sd15(pipe, folder / "model.safetensors")
    return folder


@pytest.fixture
def file(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder")) / "model.safetensors"


@pytest.fixture(scope="module")
def sdxl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = shrunken.sdxl(unet=shrunken.sdxl_unet(**shrunken.THREE_LEVELS))
    folder = shrunken.save(pipe, tmp_path_factory.mktemp("sdxl") / "folder")
    return save_sdxl(pipe, folder / "model.safetensors")


def rewritten(file: Path, change: Callable[[State], object], **metadata: str) -> Path:
    state = load_file(file)
    change(state)
    save_file(state, file, metadata=metadata or None)
    return file


def scheduler_of(file: Path) -> Any:
    return load_pipeline(find_model(str(file)), "cpu").scheduler


def marked(*names: str) -> Callable[[State], object]:
    return lambda state: state.update({name: torch.zeros(0) for name in names})


V = ("v_prediction", False, "leading")
ZERO = ("v_prediction", True, "trailing")


@pytest.mark.parametrize(
    ("markers", "metadata", "expected"),
    [
        ((), {}, ("epsilon", False, "leading")),
        (("v_pred",), {}, V),
        (("v_pred", "ztsnr"), {}, ZERO),
        (("ztsnr",), {}, ZERO),
        ((), {"modelspec.prediction_type": "v"}, V),
        ((), {"modelspec.predict_key": "v"}, V),
        ((), {"modelspec.prediction_type": "epsilon"}, ("epsilon", False, "leading")),
        ((), {"ss_v_parameterization": "True", "ss_zero_terminal_snr": "True"}, ZERO),
        (
            (),
            {"ss_v_parameterization": "False", "ss_zero_terminal_snr": "False"},
            ("epsilon", False, "leading"),
        ),
        (("ztsnr",), {"modelspec.prediction_type": "v"}, ZERO),
    ],
)
@pytest.mark.quick("markers[036]*")
def test_what_an_sdxl_file_predicts(
    sdxl_file: Path,
    tmp_path: Path,
    markers: tuple[str, ...],
    metadata: dict[str, str],
    expected: tuple[Any, ...],
) -> None:
    state = load_file(sdxl_file) | {name: torch.zeros(0) for name in markers}
    own = sdxl_file.parent / f"{tmp_path.name}.safetensors"
    save_file(state, own, metadata=metadata or None)
    located = find_model(str(own))
    config = load_pipeline(located, "cpu").scheduler.config
    assert (config.prediction_type, config.rescale_betas_zero_snr, config.timestep_spacing) == expected
    assert bool(located.notes) == (expected[0] != "epsilon")
    text = write_script(located, resolve("baseline"), "cpu", prompt="a red circle", call={}).text
    assert ("v_prediction" in text) == (expected[0] != "epsilon"), "a script draws what vivace draws"
    own.unlink()


def test_v_prediction_of_sd_15_starts_from_pure_noise(file: Path) -> None:
    scheduler = scheduler_of(rewritten(file, marked("v_pred", "ztsnr")))
    scheduler.set_timesteps(4)
    assert scheduler.timesteps[0] == 999
    assert scheduler.sigmas[0] > 1000
    assert scheduler.config.prediction_type == "v_prediction"


@pytest.mark.parametrize(
    ("markers", "metadata", "says"),
    [
        (("v_pred",), {"modelspec.prediction_type": "epsilon"}, "contradicts itself on what it predicts"),
        ((), {"modelspec.prediction_type": "v", "ss_v_parameterization": "False"}, "contradicts itself"),
        ((), {"modelspec.prediction_type": "sample"}, "that it predicts 'sample'"),
        ((), {"ss_v_parameterization": "perhaps"}, "neither True nor False"),
        (("edm_vpred.sigma_max",), {}, "is CosXL"),
    ],
)
def test_a_prediction_that_cannot_be_told(
    file: Path, markers: tuple[str, ...], metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(UnusableModel, match=re.escape(says)):
        find_model(
            str(
                rewritten(
                    file, lambda state: state.update(dict.fromkeys(markers, torch.zeros(1))), **metadata
                )
            )
        )


def test_what_is_assumed_is_said(file: Path) -> None:
    (note,) = find_model(str(rewritten(file, marked("ztsnr")))).notes
    assert "v is assumed" in note
    named = file.rename(file.with_name("some-vpred.safetensors"))
    (note,) = find_model(str(rewritten(named, lambda state: state.pop("ztsnr")))).notes
    assert "read as epsilon-prediction" in note


def scaled(state: State, key: str, scale: torch.Tensor, name: str) -> None:
    """Replace a weight by its fp8 code, so that weight times scale is nearly the weight."""
    weight = state[f"{key}.weight"]
    whole = scale
    for axis, length in enumerate(weight.shape):
        if whole.dim() == weight.dim():
            whole = whole.repeat_interleave(length // whole.shape[axis], dim=axis)
    if whole.dim() == 1 and whole.numel() > 1:
        whole = whole[:, None]
    state[f"{key}.weight"] = (weight / whole).to(FP8)
    state[f"{key}.{name}"] = scale


@pytest.mark.parametrize("name", ["weight_scale", "scale_weight"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (8, 1), (1, 8), (2, 4)])
@pytest.mark.diagonal
@pytest.mark.quick("shape5*")
def test_fp8_weights_are_multiplied_by_their_scales(
    file: Path, pipe: Any, name: str, shape: tuple[int, ...]
) -> None:
    own = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q.weight.detach()
    scale = torch.rand(shape) * 0.001 + 0.001

    def change(state: State) -> None:
        scaled(state, LAYER, scale, name)
        state[f"{LAYER}.{'input_scale' if name == 'weight_scale' else 'scale_input'}"] = torch.ones(())
        if name == "scale_weight":
            state[UNET + "scaled_fp8"] = torch.zeros(0, dtype=FP8)
        else:
            description = json.dumps({"format": "float8_e4m3fn"}).encode()
            state[f"{LAYER}.comfy_quant"] = torch.tensor(list(description), dtype=torch.uint8)

    assert load_file(file)[f"{LAYER}.weight"].shape == (8, 8)
    located = find_model(str(rewritten(file, change)))
    loaded = load_pipeline(located, "cpu")
    read = loaded.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q.weight
    assert float(read.std()) == pytest.approx(float(own.std()), rel=0.05)
    assert torch.allclose(read, own, rtol=0.07, atol=2e-3 * float(scale.max()))
    others = loaded.unet.state_dict()
    assert sum(not torch.equal(value, others[key]) for key, value in pipe.unet.state_dict().items()) == 1
    assert any("multiplied by their scales" in note for note in located.notes)
    with pytest.raises(UsageError, match="its weights have scales"):
        write_script(located, resolve("baseline"), "cpu", prompt="a red circle", call={})


def test_plain_fp8_is_read_as_it_is(file: Path, pipe: Any) -> None:
    def change(state: State) -> None:
        state.update({key: value.to(FP8) for key, value in state.items() if value.is_floating_point()})

    located = find_model(str(rewritten(file, change)))
    assert located.notes == ()
    read = load_pipeline(located, "cpu").unet.state_dict()
    assert all(torch.equal(read[key], value.to(FP8).float()) for key, value in pipe.unet.state_dict().items())


def description(kind: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"weight_scale_inv": torch.ones(1)}, f"has {LAYER}.weight_scale_inv beside {LAYER}.weight"),
        ({"weight_zero_point": torch.ones(1)}, "weight_zero_point beside"),
        ({"scale": torch.ones(1)}, f"{LAYER}.scale beside"),
        ({"weight.codebook": torch.ones(4)}, "weight.codebook beside"),
        ({"weight_scale": torch.ones(3)}, "does not divide"),
        ({"weight_scale": torch.ones(1, dtype=torch.int32)}, "with a scale in I32"),
        ({"weight_scale": torch.ones(1), "scale_weight": torch.ones(1)}, "beside"),
        (
            {"weight_scale": torch.ones(1), "comfy_quant": description("int8_tensorwise")},
            "int8_tensorwise by its description",
        ),
        ({"comfy_quant": description("float8_e4m3fn")}, "but has no scale"),
        ({"comfy_quant": torch.ones(3, dtype=torch.uint8)}, "comfy_quant cannot be read"),
        ({"weight": torch.ones(8, 8, dtype=torch.int8)}, "as I8, which is a code"),
        ({"weight.absmax": torch.ones(4)}, "bitsandbytes"),
        ({"weight.quant_state.bitsandbytes__nf4": torch.ones(4, dtype=torch.uint8)}, "bitsandbytes"),
        ({"SCB": torch.ones(32)}, "bitsandbytes"),
        ({"weight_scale_2": torch.ones(1)}, "nvfp4"),
        ({"weight._data": torch.ones(1)}, "optimum-quanto"),
        ({"qweight": torch.ones(1), "qzeros": torch.ones(1)}, "AWQ or GPTQ"),
        (
            {"wscales": torch.ones(1), "qweight": torch.ones(1), "lora_down": torch.ones(1)},
            "SVDQuant for Nunchaku",
        ),
        ({"lora_down.weight": torch.ones(1)}, "a model with a LoRA beside its weights"),
    ],
)
def test_a_companion_of_a_weight_that_is_not_read_is_refused(file: Path, more: State, says: str) -> None:
    change = {f"{LAYER}.{key}": value for key, value in more.items()}
    with pytest.raises(UnusableModel, match=re.escape(says)) as caught:
        find_model(str(rewritten(file, lambda state: state.update(change))))
    assert str(file) in str(caught.value)


def test_scales_without_a_weight_or_of_other_parts_are_refused(file: Path) -> None:
    whole = file.read_bytes()
    for change, says in (
        (
            lambda state: state.update({f"{UNET}lost.weight_scale": torch.ones(1)}),
            "lost.weight_scale without a weight",
        ),
        (
            lambda state: state.update({f"{UNET}scaled_fp8": torch.zeros(0)}),
            "has no scale beside any of them",
        ),
        (
            lambda state: scaled(
                state,
                "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1",
                torch.ones(()),
                "weight_scale",
            ),
            "scales of the denoiser alone",
        ),
    ):
        file.write_bytes(whole)
        with pytest.raises(UnusableModel, match=says):
            find_model(str(rewritten(file, change)))
    file.write_bytes(whole)
    layers = {LAYER.removeprefix(UNET): {"format": "float8_e4m3fn"}}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    with pytest.raises(UnusableModel, match="but has no scale"):
        find_model(str(rewritten(file, lambda state: None, **metadata)))
    find_model(
        str(
            rewritten(
                file, lambda state: scaled(state, LAYER, torch.tensor(0.001), "weight_scale"), **metadata
            )
        )
    )


def test_tensors_that_are_not_used_are_counted(file: Path) -> None:
    more = {f"model_ema.{number}": torch.zeros(1) for number in range(3)} | {"betas": torch.zeros(2)}
    (note,) = find_model(str(rewritten(file, lambda state: state.update(more)))).notes
    assert re.search(
        r"model\.safetensors: 4 of the file's \d+ tensors are not used: model_ema\.\* \(3\), betas \(1\)",
        note,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state.update({UNET + "input_blocks.99.0.weight": torch.ones(8)}),
            "it is another model",
        ),
        (
            lambda state: state.pop(f"{LAYER}.weight"),
            r"lacks 1 of 684 tensors, such as input_blocks.1.1.transformer_blocks.0.attn2.to_q.weight",
        ),
    ],
)
def test_a_denoiser_of_another_shape_is_refused(file: Path, change: Any, says: str) -> None:
    with pytest.raises(UnusableModel, match=says):
        load_pipeline(find_model(str(rewritten(file, change))), "cpu")


def test_another_prefix_of_the_denoiser_is_read(file: Path, pipe: Any) -> None:
    def change(state: State) -> None:
        for name in [name for name in state if name.startswith(UNET)]:
            state[name.removeprefix("model.")] = state.pop(name)

    located = find_model(str(rewritten(file, change)))
    read = load_pipeline(located, "cpu").unet.state_dict()
    assert all(torch.equal(read[key], value) for key, value in pipe.unet.state_dict().items())


FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"
ONE, BLOCK = (1,), (8, 64)


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"distilled_guidance_layer.in_proj.bias": ONE, FLUX: ONE, "img_in.weight": BLOCK}, "Chroma"),
        ({"single_stream_modulation.lin.weight": ONE, FLUX: ONE, "img_in.weight": BLOCK}, "FLUX.2"),
        ({"cap_embedder.0.weight": ONE, "noise_refiner.0.adaLN_modulation.0.weight": ONE}, "Z-Image"),
        ({"cap_embedder.0.weight": ONE, "noise_refiner.0.adaLN_modulation.1.weight": ONE}, "Lumina 2"),
        (
            {"attention_y_norm.weight": ONE, "t_block.1.weight": ONE, "blocks.0.scale_shift_table": ONE},
            "Sana",
        ),
        ({"txt_in.individual_token_refiner.blocks.0.norm1.weight": ONE, FLUX: ONE}, "HunyuanVideo"),
        ({"txt_in.text_norm.weight": ONE, "transformer_blocks.0.x": ONE}, "Qwen-Image 2.1"),
        (
            {FLUX: ONE, "img_in.weight": (8, 384), "guidance_in.in_layer.weight": ONE},
            "a FLUX.1 variant with inputs other than text: FLUX.1 Fill",
        ),
        ({FLUX: ONE, "img_in.weight": (8, 64), "controlnet_blocks.0.weight": ONE}, "a ControlNet"),
        (
            {"x.qweight": ONE, "x.lora_down": ONE, "x.wscales": ONE},
            "a model that was quantised with SVDQuant",
        ),
        ({"down_blocks.0.motion_modules.0.proj_in.weight": ONE}, "an AnimateDiff motion module"),
    ],
)
def test_what_has_tensors_of_several_kinds_is_named_by_the_right_one(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], what: str
) -> None:
    file = tmp_path / "model.safetensors"
    for prefix in ("", "diffusion_model."):
        tensors = {prefix + name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
        save_file(tensors, file)
        with pytest.raises(UnusableModel, match=re.escape(f"{file} is {what}")):
            contents_of(file)


EVERY = [
    *CONFUSABLE,
    *(row for family in FAMILIES if family.files for row in family.files.signatures),
    *OTHERS,
]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.what[:40])
def test_every_signature_is_told_by_its_own_tensors(row: Signature) -> None:
    names = [("x" if each.startswith("*") else "") + each.strip("*") for each in row.has]
    names = [name + ("y" if each.endswith("*") else "") for name, each in zip(names, row.has, strict=True)]
    shapes = {name: [12, 12] for name in names} | {name: [12, 12] for name, _, _ in row.sizes}
    for name, axis, length in row.sizes:
        shapes[name][axis] = length
    tensors = {name: {"shape": shape} for name, shape in shapes.items()}
    found = signature_of(Path("model"), TensorNames(tensors), tensors)
    assert found is not None
    assert found[1].what == row.what
    assert found[1].entry is None or found[1].entry in CATALOGUE or found[1].entry == "sd2"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.engine", b"...", "is a TensorRT engine"),
        ("model.ckpt", b"...", "is a pickle"),
        ("model.onnx", b"...", "is an ONNX graph"),
        ("model-00001-of-00003.safetensors", b"...", "one of the 3 files that its weights are spread over"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        ("model.safetensors", b"<!DOCTYPE html><html>", "a web page"),
        ("model.safetensors", b"PK\x03\x04" + b"\0" * 40, "a zip archive"),
        ("model.safetensors", b"GGUF" + b"\x03" * 40, "a GGUF file"),
    ],
)
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnusableModel, match=re.escape(says)):
        find_model(str(tmp_path / name))


def test_flux_without_a_guidance_input_says_how_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({FLUX: torch.zeros(1), "img_in.weight": torch.zeros(8, 64), "vae.x": torch.zeros(1)}, file)
    contents = contents_of(file)
    assert contents.entry == "flux-schnell"
    assert "no tensor takes a guidance scale" in contents.notes[0]
    assert "1 of the file's 3 tensors are not used: vae.* (1)" in contents.notes[1]
    shapes = {FLUX: (1,), "img_in.weight": (8, 64), "guidance_in.in_layer.weight": (1,)}
    save_file(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "flux1-kontext.safetensors"
    )
    assert "FLUX.1 Kontext" in contents_of(tmp_path / "flux1-kontext.safetensors").notes[0]


def test_notes_are_shown(file: Path, tmp_path: Path) -> None:
    rewritten(file, marked("v_pred", "ztsnr"))
    small = ["--num-inference-steps", "1", "--height", "64", "--width", "64", "--device", "cpu"]
    done = run_vivace(
        tmp_path, "generate", "a red circle", "--model", str(file), *small, "--out", str(tmp_path / "out")
    )
    assert "note: model.safetensors: v-prediction, zero terminal SNR: the tensor v_pred" in done.stderr


def test_an_image_of_a_v_prediction_file_is_that_of_its_folder(file: Path, pipe: Any) -> None:
    call = {"height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "np"}

    def drawn(session: Any) -> Any:
        return np.asarray(session("a red circle", generator=torch.Generator().manual_seed(0), **call).images)

    rewritten(file, marked("v_pred", "ztsnr"))
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(
        pipe.scheduler.config,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    folder = shrunken.save(pipe, file.parent.parent / "v")
    assert np.allclose(
        drawn(vivace.load(str(file), device="cpu")), drawn(vivace.load(str(folder), device="cpu")), atol=1e-4
    )


def test_nothing_is_fetched_for_a_file_that_is_refused(client: Hub, tmp_path: Path) -> None:
    file = tmp_path / "chroma.safetensors"
    names = (
        "distilled_guidance_layer.in_proj.bias",
        FLUX,
        "img_in.weight",
        "scaled.weight",
        "scaled.weight_scale",
    )
    save_file({name: torch.zeros(8, 64) for name in names}, file)
    with pytest.raises(UnusableModel, match="is Chroma of a size"):
        find_model(str(file))
    assert not client.files


@pytest.mark.parametrize("predicts", ["v_prediction", "epsilon"])
@pytest.mark.quick("v_prediction")
def test_sd_2_predicts_what_the_configuration_beside_it_says(
    pipe: Any, tmp_path: Path, predicts: str
) -> None:
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type=predicts)
    file = save_sd2(pipe, shrunken.save(pipe, tmp_path / "folder") / "model.safetensors")
    located = find_model(str(file))
    loaded = load_pipeline(located, "cpu")
    assert loaded.scheduler.config.prediction_type == predicts
    assert f"predicts {predicts}" in located.notes[0]
    for name in ("unet", "vae"):
        ours, theirs = getattr(loaded, name).state_dict(), getattr(pipe, name).state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    if predicts == "epsilon":
        with pytest.raises(UnusableModel, match="predicts epsilon; correct"):
            find_model(str(rewritten(file, marked("v_pred"))))


def test_sd_2_without_a_configuration_says_what_to_do(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"is an SD 2 model, and does not say .* put it into a folder"):
        find_model(str(save_sd2(pipe, tmp_path / "model.safetensors")))
