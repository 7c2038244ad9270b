"""Whole models in one .safetensors file, in their authors' layout."""

import re
import runpy
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vivace
from tests import shrunken
from tests.hub_server import Hub, Repository
from tests.original_layout import save_sd15, save_sdxl
from tinyworld import flux
from vivace.errors import NoEffect, Unsupported, UnusableModel, UsageError
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.models.checkpoints.read_denoiser import original_layout
from vivace.models.checkpoints.single_file import contents_of
from vivace.models.hub import Located
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.opening import open_session
from vivace.runtime.workloads import checked_request


def draw(model: str) -> np.ndarray:
    session = vivace.load(model, device="cpu")
    generator = torch.Generator().manual_seed(0)
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "np"}
    return np.asarray(session("a red circle", generator=generator, **call).images)


@pytest.fixture
def pipe() -> Any:
    return shrunken.sd15()


@pytest.fixture
def folder(pipe: Any, tmp_path: Path) -> Path:
    return shrunken.save(pipe, tmp_path / "folder")


@pytest.fixture
def served(client: Hub, folder: Path) -> Hub:
    """SD 1.5's repository, which has the configuration."""
    revision = str(CATALOGUE["sd15"].origin.revision)
    client.repositories["stable-diffusion-v1-5/stable-diffusion-v1-5"] = Repository({revision: folder})
    return client


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.quick("True")
def test_a_script_of_a_single_file_draws_the_same(
    served: Hub, pipe: Any, folder: Path, tmp_path: Path, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(save_sd15(pipe, (folder if beside else tmp_path) / "model.safetensors"))
    located, call = (
        checked_request(file, "baseline").located,
        {"height": 64, "width": 64, "num_inference_steps": 2},
    )
    text = write_script(located, resolve("baseline"), "cpu", prompt="a red circle", call=call).text
    assert "vivace" not in text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draw.py").write_text(text)
    runpy.run_path("draw.py")
    session = open_session(located, resolve("baseline"), "cpu", call)
    drawn = session("a red circle", generator=torch.Generator().manual_seed(0)).images[0]
    with Image.open("picture.png") as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(drawn))


def test_a_single_file_draws_what_the_folder_draws(
    served: Hub, pipe: Any, folder: Path, tmp_path: Path
) -> None:
    file = save_sd15(pipe, tmp_path / "model.safetensors")
    located = find_model(str(file))
    assert (located.model.name, located.model.source) == (str(file), "file")
    assert located.defaults == find_model("sd15").defaults
    assert np.allclose(draw(str(file)), draw(str(folder)), atol=1e-5), "sums are rounded in another order"
    assert {name for name in served.files if name.endswith(".safetensors")} == set(), "configuration alone"


def test_configuration_beside_the_file_needs_no_hub(pipe: Any, folder: Path, tmp_path: Path) -> None:
    file = save_sd15(pipe, folder / "model.safetensors", dtype=torch.float16)
    loaded = load_pipeline(find_model(str(file)), "cpu")
    assert loaded.dtype == loaded.vae.dtype == loaded.text_encoder.dtype == torch.float32
    for name in ("unet", "vae", "text_encoder"):
        ours, theirs = getattr(loaded, name).state_dict(), getattr(pipe, name).state_dict()
        assert all(torch.equal(ours[key], theirs[key].half().float()) for key in theirs if theirs[key].dim())


def test_sdxl_with_its_two_text_encoders(tmp_path: Path) -> None:
    pipe = shrunken.sdxl(unet=shrunken.sdxl_unet(**shrunken.THREE_LEVELS))
    folder = shrunken.save(pipe, tmp_path / "folder")
    located = find_model(str(save_sdxl(pipe, folder / "model.safetensors")))
    assert located.entry is CATALOGUE["sdxl"]
    loaded = load_pipeline(located, "cpu")
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        ours, theirs = getattr(loaded, name).state_dict(), getattr(pipe, name).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def test_without_the_configuration(client: Hub, pipe: Any, tmp_path: Path) -> None:
    file = save_sd15(pipe, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported) as caught:
        find_model(str(file))
    assert "holds only weights; its configuration and tokenizers (a few MB) come from sd15" in str(
        caught.value
    )
    assert "put the file into a folder that has them" in str(caught.value)


def test_a_file_with_other_weights_is_another_model(served: Hub, pipe: Any, tmp_path: Path) -> None:
    file = save_sd15(pipe, tmp_path / "model.safetensors")
    before = find_model(str(file)).model.revision
    pipe.unet.conv_out.weight.data += 1
    assert find_model(str(save_sd15(pipe, file))).model.revision != before


def test_a_damaged_file(served: Hub, pipe: Any, tmp_path: Path) -> None:
    file = save_sd15(pipe, tmp_path / "model.safetensors")
    whole = file.read_bytes()
    for content, says in (
        (whole[:-10], "is truncated"),
        (b"PK\x03\x04" + whole[:500], "is not a safetensors file"),
    ):
        file.write_bytes(content)
        with pytest.raises(UnusableModel, match=f"model.safetensors {says}") as caught:
            checked_request(str(file), "baseline")
        assert caught.value.exit_code == 3


TEXT = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"
SDXL_TEXT = "conditioner.embedders.1.model.positional_embedding"
UNET = "model.diffusion_model.input_blocks.0.0.weight"
VAE = "first_stage_model.decoder.conv_in.weight"
FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"
PREFIX = "model.diffusion_model."
ENCODERS = {"text_encoders.clip_l.x": (1,), "text_encoders.t5xxl.x": (1,), "vae.x": (1,)}


def header(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    save_file({name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize(
    ("shapes", "entry", "component"),
    [
        ({TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}, "sd15", None),
        ({SDXL_TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}, "sdxl", None),
        ({SDXL_TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,), "edm_mean": (4,)}, "playground", None),
        (
            {FLUX: (1,), "img_in.weight": (8, 64), "guidance_in.in_layer.weight": (1,)},
            "flux-dev",
            "transformer",
        ),
        ({FLUX: (1,), "img_in.weight": (8, 64)}, "flux-schnell", "transformer"),
        ({f"pipe.dit.{FLUX}": (1,), "pipe.dit.img_in.weight": (8, 64)}, "flux-schnell", "transformer"),
        ({PREFIX + FLUX: (1,), PREFIX + "img_in.weight": (8, 64), **ENCODERS}, "flux-schnell", None),
    ],
)
def test_the_model_is_told_by_its_tensors(
    shapes: dict[str, tuple[int, ...]], entry: str, component: str | None, tmp_path: Path
) -> None:
    contents = contents_of(header(tmp_path / "model.safetensors", shapes))
    assert (contents.entry, contents.component) == (entry, component)


SD15_FILE = {TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}
SDXL_FILE = {SDXL_TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}
DEV_FILE = {FLUX: (1,), "img_in.weight": (8, 64), "guidance_in.in_layer.weight": (1,)}


@pytest.mark.parametrize(
    ("shapes", "name", "title", "expected"),
    [
        (SDXL_FILE, "sdxl_lightning_8step", "", (8, 0.0, "EulerDiscreteScheduler", 1024)),
        (SDXL_FILE, "juggernautXL_v9Rdphoto2Lightning", "", (4, 0.0, "EulerDiscreteScheduler", 1024)),
        (SDXL_FILE, "model", "RealVisXL V5.0 Lightning", (4, 0.0, "EulerDiscreteScheduler", 1024)),
        (SDXL_FILE, "sd_xl_turbo_1.0_fp16", "", (1, 0.0, "EulerAncestralDiscreteScheduler", 512)),
        (SDXL_FILE, "dreamshaperXL_v21TurboDPMSDE", "", (4, 0.0, "EulerAncestralDiscreteScheduler", 1024)),
        (SDXL_FILE, "Hyper-SDXL-2steps", "", (2, 0.0, "DDIMScheduler", 1024)),
        (SDXL_FILE, "bigaspDMD2", "", (4, 0.0, "LCMScheduler", 1024)),
        (SD15_FILE, "dreamshaper_8LCM", "", (4, 1.0, "LCMScheduler", 512)),
        (DEV_FILE, "flux-dev-schnell-merge", "", (4, 3.5, None, 1024)),
        (DEV_FILE, "flux_turbo_merged", "", (8, 3.5, "FlowMatchEulerDiscreteScheduler", 1024)),
        (SDXL_FILE, "hyperrealism_xl", "", (50, 5.0, None, 1024)),
        (SD15_FILE, "calcmodel", "", (50, 7.5, None, 512)),
        (SD15_FILE, "photon_turbo", "", (50, 7.5, None, 512)),
    ],
)
def test_a_name_of_few_steps_sets_them_and_says_so(
    shapes: dict[str, tuple[int, ...]],
    name: str,
    title: str,
    expected: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {key: torch.zeros(shape, dtype=torch.float16) for key, shape in shapes.items()}
    save_file(
        tensors, tmp_path / f"{name}.safetensors", metadata={"modelspec.title": title} if title else None
    )
    nothing = Located(tmp_path, {}, None, None, (), (), "0" * 12)
    monkeypatch.setattr("vivace.models.hub.locate", lambda origin, **_: nothing)
    located = find_model(str(tmp_path / f"{name}.safetensors"))
    entry = located.entry
    assert entry is not None
    scheduler = None if entry.scheduler is None else entry.scheduler.class_name
    assert (entry.num_inference_steps, entry.guidance_scale, scheduler, entry.width) == expected
    said = [note for note in located.notes if "--num-inference-steps" in note]
    assert len(said) == (name not in ("hyperrealism_xl", "calcmodel"))


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"lora_unet_down_blocks_0.lora_down.weight": (1,)}, "is a LoRA, not a model"),
        ({"transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight": (1,)}, "is a LoRA, not a model"),
        ({"lora_te1_text_model_x.hada_w1_a": (1,)}, "is a LoRA"),
        ({"clip_l": (2, 768), "clip_g": (2, 1280)}, "is an embedding"),
        ({"control_model.input_blocks.0.0.weight": (1,)}, "is a ControlNet"),
        ({"image_proj.proj.weight": (1,), "ip_adapter.1.to_k_ip.weight": (1,)}, "is an IP-Adapter"),
        (SD15_FILE | {UNET: (8, 9, 3, 3)}, "is an inpainting model, not a text-to-image model"),
        (SD15_FILE | {UNET: (8, 12, 3, 3)}, "has not 4 channels, or was written with another shape"),
        ({FLUX: (1,), "img_in.weight": (512,)}, "another model, or was written with other shapes"),
        ({"early_stream_modulations.image.lin.weight": (8, 8)}, "is FLUX.3, which has no pipeline"),
        ({f"wrapped.{name}": shape for name, shape in DEV_FILE.items()}, "is not a model that vivace knows"),
        (
            {"down_blocks.0.resnets.0.conv1.weight": (1,)},
            "one component in diffusers' layout; give the folder",
        ),
        ({"decoder.conv_in.weight": (1,)}, "is a VAE alone"),
        ({"text_model.embeddings.token_embedding.weight": (1,)}, "is a text encoder alone"),
        ({"model.embed_tokens.weight": (1,)}, "is a language model"),
        ({"scaled_fp8": (1,), FLUX: (1,)}, "scaled fp8 weights"),
        ({"x": (1,)}, "is not a model that vivace knows; supported are single files of SD 1.5, SDXL, FLUX.1"),
    ],
)
def test_what_is_no_whole_model(shapes: dict[str, tuple[int, ...]], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=re.escape(says)):
        contents_of(header(tmp_path / "model.safetensors", shapes))


def test_a_file_that_fits_two_families_names_both(tmp_path: Path) -> None:
    qwen = {"txt_norm.weight": (1,), "transformer_blocks.0.attn.add_q_proj.weight": (1,)}
    file = header(tmp_path / "model.safetensors", {FLUX: (1,), "img_in.weight": (3072, 64)} | qwen)
    with pytest.raises(
        UnusableModel,
        match=r"model\.safetensors has the tensors of FLUX\.1 \(.* and of Qwen-Image \(txt_norm",
    ):
        find_model(str(file))


def serve_flux(client: Hub, flux_weights: Path, tmp_path: Path) -> Path:
    """A small FLUX.1 [dev], as a folder and at the hub."""
    base = Path(shutil.copytree(flux_weights / flux.FOLDER, tmp_path / "base"))
    revision = str(CATALOGUE["flux-dev"].origin.revision)
    client.repositories["black-forest-labs/FLUX.1-dev"] = Repository({revision: base})
    return base


def in_the_authors_layout(denoiser: Any) -> dict[str, torch.Tensor]:
    state = denoiser.state_dict()
    return {name: tensor.join(state).clone() for name, tensor in original_layout(denoiser).items()}


def test_a_flux_transformer_alone_takes_the_rest_from_the_hub(
    client: Hub, flux_weights: Path, tmp_path: Path
) -> None:
    base = serve_flux(client, flux_weights, tmp_path)
    transformer = load_pipeline(find_model(str(base)), "cpu").transformer
    file = tmp_path / "flux1-dev.safetensors"
    save_file(in_the_authors_layout(transformer), file)
    located = find_model(str(file))
    read = load_pipeline(located, "cpu").transformer.state_dict()
    assert all(torch.equal(read[name], value) for name, value in transformer.state_dict().items())
    assert (located.folder / "transformer" / "config.json").is_file()
    assert find_model(str(file)).defaults["num_inference_steps"] == 28
    assert not {name for name in client.files if name.startswith("transformer/diffusion")}, "not its weights"


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], kind: str | None = None) -> Path:
    """A GGUF file; matrices of rows that are a multiple of its blocks in `kind`, all else in fp32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if kind is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
            quant_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_flux(path: Path, **more: torch.Tensor) -> Path:
    shapes = {FLUX: (1,), "img_in.weight": (8, 64), "guidance_in.in_layer.weight": (1,)}
    return write_gguf(path, {name: torch.zeros(shape) for name, shape in shapes.items()} | more)


def test_a_gguf_file_of_flux_draws_as_its_weights_quantised_here(
    client: Hub, flux_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = serve_flux(client, flux_weights, tmp_path)
    file = gguf_flux(tmp_path / "flux1-dev-Q8_0.gguf")
    assert contents_of(file).entry == "flux-dev"
    located = find_model(str(file))
    assert located.model.source == "file"
    assert not {name for name in client.files if name.startswith("transformer/diffusion")}, "not its weights"

    transformer = load_pipeline(find_model(str(base)), "cpu").transformer
    write_gguf(file, in_the_authors_layout(transformer), "Q8_0")
    session = vivace.load(str(file), device="cpu")
    layer = session.pipe.transformer.transformer_blocks[0].attn.to_q
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.quant_type.name == "Q8_0"
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}

    def picture(session: Any) -> np.ndarray:
        return np.asarray(session("a red circle", generator=torch.Generator().manual_seed(0), **call).images)

    drawn = picture(session)
    whole = picture(vivace.load(str(base), device="cpu"))
    ours = picture(vivace.load(str(base), "quantize(q8_0, backend=gguf, min_weights=0)", device="cpu"))
    assert np.abs(drawn - ours).max() < np.abs(drawn - whole).max()
    assert np.abs(drawn - whole).max() < 0.2
    with pytest.raises(NoEffect, match="the weights are quantised already"):
        vivace.load(str(file), "quantize(int8)", device="cpu")

    with pytest.raises(UsageError, match="no public call of diffusers reads it"):
        write_script(find_model(str(file)), resolve("baseline"), "cpu", prompt="a red circle", call=call)
    monkeypatch.setattr("vivace.runtime.export.check_loadable", lambda _: None)  # as of FLUX's true width
    text = write_script(
        find_model(str(file)), resolve("baseline"), "cpu", prompt="a red circle", call=call
    ).text
    assert re.search(r"quantization_config=GGUFQuantizationConfig\(compute_dtype=[^)]*float32\)", text), text
    revision = located.model.revision
    write_gguf(file, in_the_authors_layout(transformer), "Q4_0")
    assert find_model(str(file)).model.revision != revision, "another file of the same name"


def test_a_file_is_planned_by_its_family(tmp_path: Path) -> None:
    shapes = {SDXL_TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}
    planned = find_weightless(str(header(tmp_path / "model.safetensors", shapes)))
    assert planned.defaults == find_weightless("sdxl").defaults
    assert planned.build().unet.config.cross_attention_dim == 2048
    with pytest.raises(UnusableModel, match="is a VAE alone"):
        find_weightless(str(header(tmp_path / "vae.safetensors", {"decoder.conv_in.weight": (1,)})))
    planned = find_weightless(str(gguf_flux(tmp_path / "flux1-dev.gguf")))
    assert planned.gguf_bytes is not None
    with pytest.raises(Unsupported, match=r"plan flux-dev with quantize\(q8_0, backend=gguf\)"):
        predict(planned, resolve("compile"))


def test_a_gguf_file_that_is_not_whole(tmp_path: Path) -> None:
    file = gguf_flux(tmp_path / "flux1-dev.gguf", more=torch.zeros(64, 64))
    whole = file.read_bytes()
    for content in (b"", b"GGUF", whole[:40], b"PK\x03\x04" + whole, whole[:-5000], whole[:-1]):
        file.write_bytes(content)
        with pytest.raises(
            UnusableModel, match=r"flux1-dev\.gguf (is not a GGUF file|is truncated)"
        ) as caught:
            find_model(str(file))
        assert caught.value.exit_code == 3


def test_a_gguf_file_that_tells_of_more_than_it_has(tmp_path: Path) -> None:
    """Numbers that the library would believe, and go on for as long as they say."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "flux")
    writer.add_array("numbers", [7, 8, 9])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = file.read_bytes()
    length = (
        whole.index(b"numbers") + len(b"numbers") + 4 + 4
    )  # behind the kinds of the field and of its items
    assert int.from_bytes(whole[length : length + 8], "little") == 3
    for many in (2**20, 2**40, 2**62):
        file.write_bytes(whole[:length] + many.to_bytes(8, "little") + whole[length + 8 :])
        start = time.monotonic()
        with pytest.raises(UnusableModel, match="is not a GGUF file, or is damaged"):
            find_model(str(file))
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("number", [4, 31, 9999])
def test_a_gguf_type_that_is_not_known_is_one_error_of_file_and_tensor(tmp_path: Path, number: int) -> None:
    file = write_gguf(tmp_path / "model.gguf", {"img_in.weight": torch.zeros(8, 64)})
    content = bytearray(file.read_bytes())
    at = content.index(b"img_in.weight") + len("img_in.weight") + 4 + 2 * 8  # behind its two dimensions
    content[at : at + 4] = number.to_bytes(4, "little")
    file.write_bytes(content)
    says = f"{file} has img_in.weight in GGML's type {number}, which is not read"
    with pytest.raises(UnusableModel, match=re.escape(says)):
        find_model(str(file))


def test_a_gguf_file_of_another_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "unet.gguf", {"input_blocks.0.0.weight": torch.zeros(8, 32)})
    with pytest.raises(UnusableModel, match="is a UNet"):
        find_model(str(file))
    shapes = {TEXT: (1,), UNET: (8, 4, 3, 3), VAE: (1,)}
    write_gguf(file, {name: torch.zeros(shape) for name, shape in shapes.items()})
    with pytest.raises(UnusableModel, match="GGUF files are read of denoisers alone"):
        find_model(str(file))


def test_without_its_package_a_gguf_file_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = len(FLUX).to_bytes(8, "little") + FLUX.encode()
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + text + struct.pack("<IQIQ", 1, 8, 0, 0)
    (tmp_path / "model.gguf").write_bytes(head.ljust(256, b"\0"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Unsupported, match=r"pip install gguf"):
        find_model(str(tmp_path / "model.gguf"))
