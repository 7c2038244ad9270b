"""Denoisers in single files of their authors' layout: every family, every way of storing weights that is read."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import save_file

from tests import shrunken
from tests.hub_server import Hub, Repository
from tests.narrow import small
from vivace.architectures import ARCHITECTURES
from vivace.errors import UnusableModel
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.models.checkpoints.gguf_file import KEPT_TYPES
from vivace.models.checkpoints.headers import read_header
from vivace.models.checkpoints.read_denoiser import original_layout, read_denoiser
from vivace.models.checkpoints.single_file import contents_of
from vivace.models.checkpoints.weight_scales import codes_of, padded_shape, scales_shape
from vivace.models.synthetic import build_component, on_meta

State = dict[str, torch.Tensor]
FAMILIES = (
    "flux2-klein-4b",
    "flux2-dev",
    "z-image-turbo",
    "qwen-image",
    "sd35-medium",
    "sdxl",
    "sd15",
    "chroma1-hd",
)
LAYER = "layers.0.attention.qkv"
"""Of Z-Image: three layers of diffusers in one tensor."""


@functools.cache
def denoiser(model: str) -> Any:
    parts = small(model).components
    torch.set_num_threads(1)
    return build_component(parts.get("transformer") or parts["unet"], "cpu", torch.float32)


def skeleton(model: str) -> Any:
    parts = small(model).components
    return on_meta(parts.get("transformer") or parts["unet"])


def in_the_authors_layout(module: Any) -> State:
    state = module.state_dict()
    return {name: tensor.join(state).clone() for name, tensor in original_layout(module).items()}


def written(path: Path, state: State, prefix: str = "", **metadata: str) -> tuple[Path, dict[str, str]]:
    """A file, and the names of its tensors without their prefix."""
    named = {prefix + name: value.contiguous() for name, value in state.items()}
    save_file(named, path, metadata=metadata or None)
    return path, {name: name.removeprefix(prefix) for name in named}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.diagonal
def test_every_tensor_comes_back(model: str, prefix: str, tmp_path: Path) -> None:
    module = denoiser(model)
    path, names = written(tmp_path / "model.safetensors", in_the_authors_layout(module), prefix)
    read = read_denoiser(path, names, {}, skeleton(model), torch.float32)
    state = module.state_dict()
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], value) for name, value in state.items())


@pytest.mark.parametrize("model", ["chroma1-hd", "flux-dev", "flux-schnell"])
def test_the_layout_of_a_width_that_alone_diffusers_converts_is_its_own(model: str) -> None:
    module = on_meta(ARCHITECTURES[model].components["transformer"], with_buffers=False)
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(module).__name__]["checkpoint_mapping_fn"]
    layout = original_layout(module)
    original = {name: torch.empty(tensor.shape, device="meta") for name, tensor in layout.items()}
    shapes = {name: value.shape for name, value in convert(checkpoint=original).items()}
    assert shapes == {name: value.shape for name, value in module.state_dict().items()}


@pytest.mark.parametrize("model", FAMILIES[:-1])
def test_the_layout_is_what_diffusers_converts(model: str) -> None:
    module = denoiser(model)
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(module).__name__]["checkpoint_mapping_fn"]
    prefix = "model.diffusion_model." if model.startswith("sd") and "35" not in model else ""
    original = {prefix + name: value for name, value in in_the_authors_layout(module).items()}
    converted = convert(checkpoint=original, config=dict(module.config))
    state = module.state_dict()
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], value) for name, value in state.items())


FULL_MODELS = ("flux-dev", "flux-schnell", "flux2-dev", "flux2-klein-4b", "qwen-image", "z-image-turbo",
               "sd35-large", "sd35-medium", "sdxl", "sd15")  # fmt: skip


@functools.cache
def sizes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a full model's denoiser, by its authors' name."""
    parts = ARCHITECTURES[model].components
    module = on_meta(parts.get("transformer") or parts["unet"], with_buffers=False)
    return {name: tensor.shape for name, tensor in original_layout(module).items()}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("model", FULL_MODELS)
@pytest.mark.diagonal
def test_a_denoiser_alone_is_told_by_its_tensors(
    model: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = {prefix + name: {"dtype": "BF16", "shape": list(shape)} for name, shape in sizes(model).items()}
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_header", lambda _: header)
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_metadata", lambda _: {})
    contents = contents_of(tmp_path / "model.safetensors")
    part = "unet" if model in ("sdxl", "sd15") else "transformer"
    assert (contents.entry, contents.component, contents.denoiser_name) == (model, part, part)
    assert set(contents.denoiser.values()) == set(sizes(model))
    assert not [note for note in contents.notes if "not used" in note]


def test_of_a_whole_model_of_these_the_denoiser_is_read_and_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = "model.diffusion_model."
    header = {
        prefix + name: {"dtype": "F16", "shape": list(shape)} for name, shape in sizes("sd35-large").items()
    }
    others = ("text_encoders.t5xxl.x", "text_encoders.clip_g.x", "first_stage_model.x")
    header |= {name: {"dtype": "F16", "shape": [1]} for name in others}
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_header", lambda _: header)
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_metadata", lambda _: {})
    contents = contents_of(tmp_path / "model.safetensors")
    assert (contents.entry, contents.component) == ("sd35-large", "transformer")
    assert set(contents.denoiser.values()) == set(sizes("sd35-large"))
    (note,) = contents.notes
    assert note.startswith("3 of the file's ")
    assert note.endswith("all but its transformer comes from sd35-large")


@pytest.mark.parametrize(("model", "width"), [("sdxl", 2048), ("sd15", 768)])
def test_a_unet_alone_takes_the_rest_from_the_hub(
    client: Hub, model: str, width: int, tmp_path: Path
) -> None:
    pipe = shrunken.sdxl() if model == "sdxl" else shrunken.sd15()
    config = dict(pipe.unet.config) | {"cross_attention_dim": width}
    if model == "sdxl":  # single files name the blocks of three levels
        config |= shrunken.THREE_LEVELS
    pipe.unet = type(pipe.unet).from_config(config).eval()
    origin: Any = CATALOGUE[model].origin
    folder = shrunken.save(pipe, tmp_path / "folder")
    client.repositories[origin.repo] = Repository({str(origin.revision or "main"): folder})
    path, _ = written(tmp_path / "unet.safetensors", in_the_authors_layout(pipe.unet))
    located = find_model(str(path))
    read = load_pipeline(located, "cpu").unet.state_dict()
    assert all(torch.equal(read[name], value) for name, value in pipe.unet.state_dict().items())
    assert located.defaults == find_model(model).defaults


# Codes


def description(kind: str, **settings: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": kind} | settings).encode()), dtype=torch.uint8)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks in the order of cuBLAS, one after the other by its formula."""
    rows, blocks = scales.shape
    shape = scales_shape("nvfp4", rows, blocks * 16)
    flat = torch.zeros(shape[0] * shape[1], dtype=scales.dtype)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * (shape[1] // 4) + block // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scales[row, block]
    return flat.reshape(shape)


def padded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    rows, columns = padded_shape(kind, weight.shape)
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def as_nvfp4(weight: torch.Tensor) -> State:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = padded(weight, "nvfp4").reshape(padded(weight, "nvfp4").shape[0], -1, 16)
    second = weight.abs().max() / (448 * 6)
    scales = (blocks.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
    quotients = blocks / (scales.float() * second).clamp(min=1e-12).unsqueeze(-1)
    codes = (quotients.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (quotients < 0)
    flat = codes.flatten(1).to(torch.uint8)
    return {
        "weight": flat[:, ::2] << 4 | flat[:, 1::2],
        "weight_scale": tiled(scales.float()).to(torch.float8_e4m3fn),
        "weight_scale_2": second,
        "comfy_quant": description("nvfp4"),
    }


def as_mxfp8(weight: torch.Tensor) -> State:
    blocks = padded(weight, "mxfp8").reshape(padded(weight, "mxfp8").shape[0], -1, 32)
    exponents = torch.ceil(torch.log2((blocks.abs().amax(-1) / 448).clamp(min=2.0**-126))) + 127
    values = blocks / torch.exp2(exponents - 127).unsqueeze(-1)
    return {
        "weight": values.flatten(1).to(torch.float8_e4m3fn),
        "weight_scale": tiled(exponents).to(torch.uint8).view(torch.float8_e8m0fnu),
        "comfy_quant": description("mxfp8"),
    }


def as_fp8(weight: torch.Tensor) -> State:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "comfy_quant": description("float8_e4m3fn"),
    }


HADAMARD = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2


def in_int8(weight: torch.Tensor, **settings: Any) -> State:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {
        "weight": codes,
        "weight_scale": scale,
        "comfy_quant": description("int8_tensorwise", per_row=True, **settings),
    }


def as_int8(weight: torch.Tensor) -> State:
    return in_int8(weight, convrot=False)


def as_convrot(weight: torch.Tensor) -> State:
    """As ComfyUI stores it: a weight's columns times the matrix, in blocks of 16 and one scale a row."""
    matrix = torch.kron(HADAMARD, HADAMARD)
    rotated = torch.cat([block @ matrix for block in weight.split(16, dim=1)], dim=1)
    return in_int8(rotated, params={"convrot": True}, convrot_groupsize=16)


STORED = {
    "scaled": as_fp8,
    "int8": as_int8,
    "convrot": as_convrot,
    "nvfp4": as_nvfp4,
    "mxfp8": as_mxfp8,
}


def with_codes(state: State, kind: str, layer: str = LAYER) -> State:
    stored = STORED[kind](state[f"{layer}.weight"])
    return state | {f"{layer}.{name}": value for name, value in stored.items()}


@pytest.mark.parametrize(
    ("kind", "error"),
    [("scaled", 0.04), ("int8", 0.02), ("convrot", 0.02), ("nvfp4", 0.2), ("mxfp8", 0.04)],
)
def test_codes_are_dequantised(kind: str, error: float, tmp_path: Path) -> None:
    module = denoiser("z-image-turbo")
    path, names = written(tmp_path / "model.safetensors", with_codes(in_the_authors_layout(module), kind))
    codes = codes_of(path, read_header(path), {})
    read = read_denoiser(path, names, codes, skeleton("z-image-turbo"), torch.float32)
    own = module.state_dict()
    changed = [name for name, value in own.items() if not torch.equal(read[name], value)]
    assert changed == [f"layers.0.attention.to_{part}.weight" for part in "qkv"]
    for name in changed:
        assert read[name].shape == own[name].shape
        assert float((read[name] - own[name]).norm() / own[name].norm()) < error


FLUX = {
    "double_blocks.0.img_attn.norm.key_norm.scale": torch.zeros(1),
    "img_in.weight": torch.zeros(8, 64),
    "guidance_in.in_layer.weight": torch.zeros(1, 1),
}
PROJ = "double_blocks.0.img_attn.proj"


@pytest.mark.parametrize("described_by", ["tensor", "metadata"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_codes_are_told_by_their_description(kind: str, described_by: str, tmp_path: Path) -> None:
    state = with_codes({**FLUX, f"{PROJ}.weight": torch.randn(40, 70)}, kind, PROJ)
    metadata = {}
    if described_by == "metadata":
        del state[f"{PROJ}.comfy_quant"]
        metadata["_quantization_metadata"] = json.dumps({"layers": {PROJ: {"format": kind}}})
    path, _ = written(tmp_path / "flux.safetensors", state, "model.diffusion_model.", **metadata)
    contents = contents_of(path)
    assert [code.kind for code in contents.codes.values()] == [kind]
    assert f"1 weights in {kind} are dequantised as they are loaded" in contents.notes


def test_a_file_says_how_many_weights_are_rotated(tmp_path: Path) -> None:
    state = with_codes(FLUX | {f"{PROJ}.weight": torch.randn(40, 64)}, "convrot", PROJ)
    path, _ = written(tmp_path / "flux.safetensors", state, "model.diffusion_model.")
    assert any("1 in int8, 1 of them rotated" in note for note in contents_of(path).notes)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("nvfp4", {"comfy_quant": None}, "and no comfy_quant that says nvfp4"),
        ("nvfp4", {"weight_scale_2": None}, "and no weight_scale_2"),
        ("nvfp4", {"weight_scale": None}, "but has no scale"),
        ("nvfp4", {"weight_scale": torch.zeros(48, 5).to(torch.float8_e4m3fn)}, "[48, 5], not [128, 8]"),
        ("nvfp4", {"weight_scale_2": torch.zeros(2)}, "weight_scale_2 beside"),
        ("nvfp4", {"weight": torch.zeros(48, 40)}, "which is F32 with scales in F8_E4M3, not nvfp4"),
        (
            "nvfp4",
            {"weight": torch.zeros(40, 40, dtype=torch.uint8)},
            "whose shape [40, 40] is none of nvfp4",
        ),
        ("mxfp8", {"weight_scale": torch.zeros(128, 4)}, "with scales in F32, not mxfp8"),
        ("mxfp8", {"weight_scale": torch.zeros(64, 4, dtype=torch.uint8)}, "[64, 4], not [128, 4]"),
        ("mxfp8", {"comfy_quant": None}, "with a scale in F8_E8M0"),
        ("scaled", {"comfy_quant": description("svdquant_w4a4")}, "says 'svdquant_w4a4'"),
        ("scaled", {"comfy_quant": description("int8_tensorwise")}, "is int8_tensorwise by its description"),
        ("int8", {"comfy_quant": None}, "which is I8 with a scale in F32"),
        ("int8", {"comfy_quant": description("int8_tensorwise", convrot=True)}, "no multiple of its convrot"),
        (
            "int8",
            {"comfy_quant": description("int8_tensorwise", convrot=True, convrot_groupsize=8)},
            "no power of four",
        ),
        ("int8", {"weight_scale": torch.ones(3, 1)}, "does not divide"),
        ("scaled", {"weight_proj_down": torch.zeros(2)}, "weight_proj_down beside"),
    ],
)
def test_wrong_codes_are_one_error_of_file_and_key(
    kind: str, change: Mapping[str, torch.Tensor | None], says: str, tmp_path: Path
) -> None:
    state = with_codes({**FLUX, f"{PROJ}.weight": torch.randn(40, 70)}, kind, PROJ)
    for name, value in change.items():
        state.pop(f"{PROJ}.{name}", None)
        if value is not None:
            state[f"{PROJ}.{name}"] = value
    path, _ = written(tmp_path / "flux.safetensors", state)
    with pytest.raises(UnusableModel, match=re.escape(says)) as caught:
        contents_of(path)
    assert str(path) in str(caught.value)
    assert PROJ in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{LAYER}.weight": None}, f"lacks 1 of 65 tensors, such as {LAYER}.weight"),
        ({"layers.7.attention.qkv.weight": torch.zeros(2)}, "such as layers.7.attention.qkv.weight"),
        ({f"{LAYER}.weight": torch.zeros(3, 3)}, f"{LAYER}.weight has the shape [3, 3]"),
        ({"norm_final.weight": torch.zeros(3)}, ""),
    ],
)
def test_a_file_of_another_model_is_one_error_of_file_and_key(
    change: Mapping[str, torch.Tensor | None], says: str, tmp_path: Path
) -> None:
    state: dict[str, Any] = in_the_authors_layout(denoiser("z-image-turbo")) | change
    present = {name: value for name, value in state.items() if value is not None}
    path, names = written(tmp_path / "model.safetensors", present)
    if not says:  # files of Z-Image have it, and nothing uses it
        assert len(read_denoiser(path, names, {}, skeleton("z-image-turbo"), torch.float32)) > 65
        return
    with pytest.raises(UnusableModel, match=re.escape(says)) as caught:
        read_denoiser(path, names, {}, skeleton("z-image-turbo"), torch.float32)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "state", "note"),
    [
        ("qwen-image-edit.safetensors", "qwen-image", "its name tells of Qwen-Image-Edit"),
        ("z_image.safetensors", "z-image-turbo", "no tensor says whether it is distilled"),
        ("klein-base.safetensors", "flux2-klein-4b", "no tensor says whether it is distilled"),
    ],
)
def test_what_tensors_do_not_say_is_noted(
    name: str, state: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = {own: {"dtype": "BF16", "shape": list(shape)} for own, shape in sizes(state).items()}
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_header", lambda _: header)
    monkeypatch.setattr("vivace.models.checkpoints.single_file.read_metadata", lambda _: {})
    assert any(note in text for text in contents_of(tmp_path / name).notes)


# GGUF


def write_gguf(
    path: Path, state: State, kinds: Mapping[str, str], shapes: Mapping[str, Any] | None = None
) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "any")
    for name, shape in (shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
    for name, value in state.items():
        values = value.float().numpy()
        if name in kinds:
            kind = gguf.GGMLQuantizationType[kinds[name]]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("model", ["flux2-klein-4b", "z-image-turbo", "qwen-image", "sd35-medium", "sdxl"])
@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.02), ("BF16", 0.01), ("TQ2_0", 1.0)])
@pytest.mark.diagonal
def test_gguf_of_every_family(model: str, kind: str, error: float, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    module = denoiser(model)
    state = in_the_authors_layout(module)
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    matrices = [name for name, value in state.items() if value.dim() == 2 and value.shape[1] % block == 0]
    path = write_gguf(tmp_path / "model.gguf", state, dict.fromkeys(matrices[:6], kind))
    names = {name: name for name in state}
    read = read_denoiser(path, names, {}, skeleton(model), torch.float32)
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    own = module.state_dict()
    assert read.keys() == own.keys()
    for name, value in own.items():
        tensor = dequantize_gguf_tensor(read[name]).float()
        assert tensor.shape == value.shape
        assert float((tensor - value).norm()) <= error * float(value.norm()), name
    kept = [name for name, value in read.items() if hasattr(value, "quant_type")]
    assert bool(kept) == (kind != "TQ2_0" and bool(matrices))


def test_a_reshaped_gguf_tensor_has_its_own_shape(tmp_path: Path) -> None:
    module = denoiser("sd15")
    state = in_the_authors_layout(module)
    name = "input_blocks.0.0.weight"
    path = write_gguf(
        tmp_path / "model.gguf", state | {name: state[name].reshape(-1, 4)}, {}, {name: state[name].shape}
    )
    read = read_denoiser(path, {own: own for own in state}, {}, skeleton("sd15"), torch.float32)
    assert torch.equal(read["conv_in.weight"], module.state_dict()["conv_in.weight"])
    wrong = write_gguf(tmp_path / "wrong.gguf", {name: state[name].reshape(-1, 4)}, {}, {name: (7, 7)})
    with pytest.raises(UnusableModel, match=f"'{name}' has the shape"):
        contents_of(wrong)


def test_types_that_diffusers_keeps_are_its_own() -> None:
    pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES

    assert set(KEPT_TYPES) == {kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES}


def test_gguf_types_that_are_dequantised_are_noted(tmp_path: Path) -> None:
    state = {**FLUX, "double_blocks.0.img_attn.proj.weight": torch.randn(8, 256)}
    path = write_gguf(tmp_path / "flux.gguf", state, {"double_blocks.0.img_attn.proj.weight": "TQ2_0"})
    assert (
        "diffusers does not compute with 1 as TQ2_0: dequantised as they are loaded"
        in contents_of(path).notes
    )


@pytest.mark.parametrize("kind", ["Q8_0", "TQ2_0"])
def test_a_unet_of_a_gguf_file_is_built(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    gguf = pytest.importorskip("gguf")
    module = denoiser("sdxl")
    state = in_the_authors_layout(module)
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    matrices = [name for name, value in state.items() if value.dim() == 2 and value.shape[1] % block == 0]
    path = write_gguf(tmp_path / "model.gguf", state, dict.fromkeys(matrices, kind))
    read = read_denoiser(path, {name: name for name in state}, {}, skeleton("sdxl"), torch.float32)
    module.save_config(tmp_path / "folder" / "unet")
    unet = diffusers.UNet2DConditionModel.from_single_file(
        read,
        config=str(tmp_path / "folder"),
        subfolder="unet",
        dtype=torch.float32,
        local_files_only=True,
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    has_codes = any(hasattr(parameter, "quant_type") for parameter in unet.parameters())
    assert has_codes == (kind == "Q8_0" and bool(matrices))
    assert unet.conv_in.weight.dtype == torch.float32
