"""Files and folders whose weights are damaged, incomplete or codes: one error that names the file and the tensor."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import shrunken
from tests.original_layout import original_vae, save_sd15, save_sdxl
from vivace.architectures.flux import FLUX
from vivace.errors import UnknownModel, UnusableModel
from vivace.models import find_model, load_pipeline
from vivace.models.checkpoints.single_file import check_parts, contents_of
from vivace.models.checkpoints.weight_scales import fits, multiplied
from vivace.models.find import obtain
from vivace.models.load import UnusedWeightsWarning

State = dict[str, torch.Tensor]
UNET = "model.diffusion_model."
LAYER = UNET + "input_blocks.1.1.transformer_blocks.0.attn2.to_q"
FP8 = torch.float8_e4m3fn
NAN = float("nan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunken.save(shrunken.sd15(), tmp_path_factory.mktemp("sd15") / "folder")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture
def file(folder: Path) -> Path:
    """A file of SD 1.5's layout beside its configuration."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    return save_sd15(shrunken.sd15(), folder / "model.safetensors")


def described(**settings: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": "float8_e4m3fn"} | settings).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_scale": torch.tensor(NAN)}, f"{LAYER}.weight_scale has values that are not finite"),
        ({"weight_scale": torch.tensor([0.1] * 7 + [float("inf")])}, "weight_scale has values that are not"),
        ({"weight_scale": torch.tensor(1e38)}, f"{LAYER}.weight times {LAYER}.weight_scale is not finite"),
        ({"weight_scale": torch.tensor(0.0)}, f"{LAYER}.weight_scale is 0 where {LAYER}.weight is not"),
        ({"weight": torch.full((8, 8), NAN).to(FP8)}, f"{LAYER}.weight times {LAYER}.weight_scale is not"),
        ({"comfy_quant": described(format="float8_e5m2")}, "is float8_e5m2 by its description, and F8_E4M3"),
        ({"comfy_quant": described(convrot=True)}, "comfy_quant says 'convrot', which vivace does not know"),
        ({"comfy_quant": described(convrot=False, full_precision_matrix_mult=True)}, ""),
    ],
)
@pytest.mark.slow("changes1-*", "changes4-*", "changes6-*")
def test_scales_that_make_no_weights_are_refused(file: Path, changes: State, says: str) -> None:
    state = load_file(file)
    state[f"{LAYER}.weight"] = (state[f"{LAYER}.weight"] * 100).to(FP8)
    state[f"{LAYER}.weight_scale"] = torch.tensor(0.01)
    state |= {f"{LAYER}.{name}": value for name, value in changes.items()}
    save_file(state, file)
    if not says:
        assert load_pipeline(find_model(str(file)), "cpu").unet is not None
        return
    with pytest.raises(UnusableModel, match=re.escape(says)) as caught:
        load_pipeline(find_model(str(file)), "cpu")
    assert str(file) in str(caught.value)


def test_weights_of_zeros_may_have_a_scale_of_zero(file: Path) -> None:
    state = load_file(file)
    state |= {f"{LAYER}.weight": torch.zeros(8, 8).to(FP8), f"{LAYER}.weight_scale": torch.tensor(0.0)}
    save_file(state, file)
    unet = load_pipeline(find_model(str(file)), "cpu").unet
    assert not unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q.weight.any()


@pytest.mark.parametrize("shape", [(256, 256), (192, 300), (160, 128), (200, 3072)])
def test_the_last_block_of_128_may_be_smaller(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    assert fits(scale.shape, shape)
    expected = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(0, shape[1], 128):
            part = slice(column, column + 128)
            expected[row, part] = weight[row, part] * scale[row // 128, column // 128]
    assert torch.equal(multiplied(weight, scale), expected)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state, name: state.pop(name), "{file} lacks {name}"),
        (lambda state, name: state.update({name: torch.ones(2, 2)}), "{name}"),
        (lambda state, name: state.update({name: state[name].to(torch.int8)}), "has {name}, as I8"),
        (
            lambda state, name: state.update({f"{name}_scale": torch.tensor(0.1)}),
            "has {name}_scale, which is a scale of weights",
        ),
    ],
)
def test_a_folder_with_other_weights_than_its_configuration(
    folder: Path, part: str, change: Callable[[State, str], object], says: str
) -> None:
    (path,) = (folder / part).glob("*.safetensors")
    state = load_file(path)
    name = next(name for name, value in state.items() if name.endswith("weight") and value.dim() == 2)
    change(state, name)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UnusableModel) as caught:
        load_pipeline(find_model(str(folder)), "cpu")
    assert says.removeprefix("{file} ").format(name=name) in str(caught.value)
    assert str(folder) in str(caught.value)


VAE, CLIP = "first_stage_model.", "cond_stage_model.transformer.text_model."


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (f"{CLIP}encoder.layers.0.mlp.fc1.weight", None, "text_encoder"),
        (f"{VAE}decoder.conv_in.weight", torch.ones(2, 2, 3, 3), ""),
        (f"{CLIP}encoder.layers.9.mlp.fc1.weight", torch.ones(8, 8), "weights in its text_encoder, and"),
        (f"{VAE}decoder.up.3.block.7.conv1.weight", torch.ones(8, 8), "weights in its vae, and"),
        ("cond_stage_model.another", torch.ones(1), "VAE and text encoders, such as {name}"),
    ],
)
def test_a_single_file_with_another_vae_or_text_encoder(
    file: Path, name: str, value: torch.Tensor | None, says: str
) -> None:
    """diffusers leaves out what it does not know, and names no file."""
    state = load_file(file)
    state.pop(name, None)
    save_file(state if value is None else state | {name: value}, file)
    with pytest.raises(UnusableModel) as caught:
        load_pipeline(find_model(str(file)), "cpu")
    assert says.format(name=name) in str(caught.value)
    assert str(file) in str(caught.value)


def test_what_training_left_in_a_single_file_is_counted(file: Path) -> None:
    left = {
        f"{VAE}loss.logvar": torch.ones(1),
        "cond_stage_model.logit_scale": torch.ones(1),
        f"{CLIP}embeddings.position_ids": torch.arange(77)[None],
    }
    save_file(load_file(file) | left, file)
    located = find_model(str(file))
    (note,) = located.notes
    assert "2 of the file's 935 tensors are not used" in note, "positions are the same in every model"
    assert load_pipeline(located, "cpu").vae is not None


def test_the_text_encoders_of_an_sdxl_file_are_checked(tmp_path: Path) -> None:
    pipe = shrunken.sdxl(unet=shrunken.sdxl_unet(**shrunken.THREE_LEVELS))
    file = save_sdxl(pipe, shrunken.save(pipe, tmp_path / "folder") / "model.safetensors")
    state = load_file(file)
    layer = "conditioner.embedders.1.model.transformer.resblocks.9.ln_1.weight"
    for name, says in (
        (layer, "its text_encoder_2"),
        ("conditioner.embedders.2.model.x", "embedders.2.model.x"),
    ):
        save_file(state | {name: torch.ones(1)}, file)
        with pytest.raises(UnusableModel, match=says):
            load_pipeline(find_model(str(file)), "cpu")


@pytest.mark.parametrize("change", [None, "lacks", "more"])
def test_the_parts_of_a_flux_file_are_checked(change: str | None, tmp_path: Path) -> None:
    pipe = load_pipeline(find_model("tiny-flux"), "cpu")
    vae = {f"vae.{name}": value for name, value in original_vae(pipe.vae).items()}
    clip = {
        f"text_encoders.clip_l.transformer.text_model.{name.removeprefix('text_model.')}": value
        for name, value in pipe.text_encoder.state_dict().items()
    }
    t5 = {
        f"text_encoders.t5xxl.transformer.{name}": value
        for name, value in pipe.text_encoder_2.state_dict().items()
        if name != "encoder.embed_tokens.weight"
    }
    state = vae | clip | t5 | {"text_encoders.clip_l.logit_scale": torch.ones(1)}
    name = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.layer_norm.weight"
    if change == "lacks":
        del state[name]
    elif change == "more":
        name = name.replace("block.0", "block.24")
        state[name] = torch.ones(4)
    file = tmp_path / "flux.safetensors"
    save_file({own: value.clone() for own, value in state.items()}, file)
    assert FLUX.files is not None
    parts = FLUX.files.signatures[0].parts
    if change is None:
        check_parts(file, parts, pipe.components)
        return
    with pytest.raises(UnusableModel, match="weights in its text_encoder_2"):
        check_parts(file, parts, pipe.components)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
@pytest.mark.quick("unet")
def test_weights_of_a_folder_that_nothing_uses_are_named(folder: Path, part: str) -> None:
    (path,) = (folder / part).glob("*.safetensors")
    state = load_file(path)
    save_file(state | {"another.weight": torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.warns(UnusedWeightsWarning, match=f"its {part} does not use: another.weight"):
        load_pipeline(find_model(str(folder)), "cpu")
    name = {
        "unet": "down_blocks.7.x",
        "vae": "encoder.down_blocks.7.x",
        "text_encoder": "encoder.layers.7.x",
    }[part]
    save_file(state | {name: torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(UnusableModel, match=re.escape(f"has {name}, and its {part} has no such layer")):
        load_pipeline(find_model(str(folder)), "cpu")


def test_averaged_weights_alone_are_named(tmp_path: Path) -> None:
    file = tmp_path / "ema.safetensors"
    names = ("model_ema.diffusion_modelinput_blocks00weight", "first_stage_model.decoder.conv_in.weight")
    save_file({name: torch.ones(1) for name in names}, file)
    with pytest.raises(UnusableModel, match=r"averaged weights \(EMA\) of its UNet alone"):
        contents_of(file)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to(path.name), "is a link that leads nowhere"),
        (lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere"),
        (lambda path: os.mkfifo(path), "is a named pipe"),
    ],
)
def test_what_is_there_and_is_no_file_is_named(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    make(tmp_path / "m.safetensors")
    with pytest.raises(UnknownModel, match=says):
        find_model(str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.SAFETENSORS", "rename it to m.safetensors"),
        ("m.sft", "rename it"),
        ("m.gguf", "is not a GGUF file"),
    ],
)
def test_a_suffix_that_is_spelt_otherwise_or_belongs_to_another_format(
    tmp_path: Path, name: str, says: str
) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UnusableModel, match=says):
        obtain(find_model(str(tmp_path / name)))
