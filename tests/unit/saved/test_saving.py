"""A saved model draws what its recipe draws afresh, bit for bit, and a folder that is not what it says is refused."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.make import make_record
from tests.typed import typed
from vivace.errors import OutputError, RecipeError, Unsupported, UnusableModel, UsageError
from vivace.foundation.spec.record import Record
from vivace.models.export_embedded import export
from vivace.models.find import find_model
from vivace.models.saved_folder import digests, saved_files
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.saving import Saved, save
from vivace.runtime.session import Session

LORA = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"
INT8 = "bf16+quantize(int8)+tiny_vae"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(model: str | Path, recipe: str = "baseline") -> Session:
    return open_session(find_model(str(model)), resolve(recipe), "cpu")


def saved(model: str, recipe: str, folder: Path) -> Saved:
    return save(find_model(model), resolve(recipe), "cpu", folder)


def drawn(session: Session) -> np.ndarray[Any, Any]:
    generator = torch.Generator("cpu").manual_seed(3)
    size = {"height": 64, "width": 64}
    return np.asarray(session("a red circle", generator=generator, num_inference_steps=2, **size).images[0])


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-sd with INT8, not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "int8"
    saved("tiny-sd", INT8, folder)
    return folder


@pytest.fixture
def copy(int8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int8, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("model", "recipe", "later"),
    [
        ("tiny-sd", INT8, ()),
        ("tiny-sd", "baseline", ()),
        ("tiny-sd", f"lora('{LORA}', scale=0.8)+quantize(int4)+channels_last@vae", ("channels_last@vae",)),
        ("tiny-sd", "distilled(lcm)+fuse_qkv+quantize(int8, convolutions=True)+deepcache", ("deepcache",)),
        ("tiny-flux", "bf16+quantize(fp8)+first_block_cache(0.1)", ("first_block_cache(0.1)",)),
        ("tiny-flux", "quantize(int8_dynamic)@denoiser,text_encoder_2", ()),
        ("tiny-flux", "fuse_qkv+quantize(fp8_weight)", ()),
        ("tiny-flux", "bf16+quantize(nvfp4, rank=8)", ()),
        ("tiny-sd", "mxfp8", ()),
    ],
)
@pytest.mark.quick("tiny-sd-bf16*", "tiny-flux-bf16+quantize(nvfp4*", "tiny-sd-distilled*")
@pytest.mark.slow("tiny-flux-bf16+quantize(nvfp4*")
def test_images_are_those_of_the_recipe_applied_afresh(
    model: str, recipe: str, later: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    afresh = opened(model, recipe)
    assert saved(model, recipe, tmp_path / "folder").later == later
    with monkeypatch.context() as patched:  # nothing is quantised again
        patched.setattr("vivace.techniques.quantize.replace_layer", None)
        loaded = opened(tmp_path / "folder")
    assert loaded.recipe.text == afresh.recipe.text
    assert loaded.effects == afresh.effects
    assert loaded.defaults == afresh.defaults
    assert np.array_equal(drawn(loaded), drawn(afresh))
    assert loaded.evidence() == afresh.evidence()


def test_pruned_blocks_stay_away(tmp_path: Path) -> None:
    pruned = saved("tiny-flux", "prune(0.3, pictures=1)+bf16", tmp_path / "folder")
    names = pruned.model.stored[0].changed["denoiser.taken_out"]
    loaded = opened(tmp_path / "folder")
    assert loaded.effects["prune@denoiser"]["denoiser.taken_out"] == names
    whole = opened("tiny-flux", "bf16")
    numbers = [sum(p.numel() for p in session.pipe.transformer.parameters()) for session in (loaded, whole)]
    assert numbers[0] < numbers[1]
    assert drawn(loaded).any()


def test_what_a_folder_says(int8: Path) -> None:
    content = json.loads((int8 / "vivace.json").read_text())
    assert content["recipe"]["text"] == "tiny_vae+dtype(bf16)+quantize(int8)"
    assert content["model"]["name"] == "tiny-sd"
    own = find_model("tiny-sd")
    name = "unet/diffusion_pytorch_model.safetensors"
    assert content["sources"][name] == hashlib.sha256(own.files[name].read_bytes()).hexdigest()
    assert str(int8.parent) not in "".join(path.read_text() for path in int8.rglob("*.json"))
    located = find_model(str(int8))
    assert located.defaults == own.defaults
    assert located.notes == ("int8 is tiny-sd with tiny_vae+dtype(bf16)+quantize(int8)",)


def test_a_plain_component_is_what_diffusers_reads(int8: Path) -> None:
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny.from_pretrained(str(int8 / "vae"), dtype=torch.bfloat16, local_files_only=True)
    assert vae.dtype == torch.bfloat16
    assert not list((int8 / "unet").glob("diffusion_pytorch_model*"))


def test_recipes_are_added_to_that_of_the_folder(int8: Path) -> None:
    assert opened(int8, "steps(3)").recipe.text == "tiny_vae+dtype(bf16)+quantize(int8)+steps(3)"
    assert opened(int8, "quantize(int8)").recipe.text == "tiny_vae+dtype(bf16)+quantize(int8)"
    with pytest.raises(Unsupported, match=r"has its recipe already.*both set the weights of denoiser"):
        opened(int8, "quantize(fp8_weight)")
    with pytest.raises(Unsupported, match=r"fuse_qkv changes weights before quantize\(int8\), whose result"):
        opened(int8, "fuse_qkv")


def test_saving_is_refused(int8: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is saved already"):
        saved(str(int8), "bf16", tmp_path / "new")
    with pytest.raises(UsageError, match="random weights"):
        saved("synthetic:sd15", "bf16", tmp_path / "new")
    with pytest.raises(OutputError, match="not empty"):
        saved("tiny-sd", "bf16", int8)
    with pytest.raises(Unsupported, match="cuda_graph: "):
        saved("tiny-sd", "quantize(int8)+cuda_graph", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_a_killed_process_left_is_named(tmp_path: Path) -> None:
    (tmp_path / ".vivace-abc.part").mkdir()
    with pytest.raises(OutputError, match=r"\.vivace-abc\.part was left by a process that was killed"):
        saved("tiny-sd", "quantize(int8)", tmp_path)
    notes = saved("tiny-sd", "quantize(int8)", tmp_path / "small").notes
    assert [note for note in notes if ".vivace-abc.part" in note]
    assert (tmp_path / "small" / "vivace.json").is_file()


def test_what_was_measured_lies_beside_the_weights(tmp_path: Path) -> None:
    proof = [make_record("baseline"), make_record("bf16")]
    save(find_model("tiny-sd"), resolve("bf16"), "cpu", tmp_path / "folder", proof=proof)
    lines = (tmp_path / "folder" / "records.jsonl").read_text().splitlines()
    assert [Record.model_validate_json(line) for line in lines] == proof
    (tmp_path / "folder" / "records.jsonl").write_text(lines[0])
    assert "records.jsonl is not the file that was saved" in refusal(tmp_path / "folder")


def test_a_merged_lora_need_not_be_there_any_more(tmp_path: Path) -> None:
    lora = shutil.copy(LORA, tmp_path / "style.safetensors")
    saved("tiny-sd", f"lora('{lora}')", tmp_path / "folder")
    afresh = drawn(opened("tiny-sd", f"lora('{lora}')"))
    Path(lora).unlink()
    assert np.array_equal(drawn(opened(tmp_path / "folder")), afresh)


def test_nothing_that_is_saved_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    """Saved folders and files for ComfyUI are published."""
    home = tmp_path / "home of mine"
    home.mkdir()
    lora, hot = (str(shutil.copy(LORA, home / f"{name}.safetensors")) for name in ("style", "hot"))
    model = export("tiny-sd", home / "model").folder
    recipe = f"lora('{lora}', scale=0.8)+lora('{hot}', hot=True, scale=0.5)"
    record = make_record("bf16")
    round_ = record.rounds[0].model_copy(update={"warnings": (f"{model}/unet is odd", f"see {lora}")})
    record = record.model_copy(
        update={
            "trial": record.trial.model_copy(update={"recipe": resolve(recipe).spec}),
            "rounds": (round_,),
        }
    )
    whole = save(find_model(str(model)), resolve(recipe), "cpu", tmp_path / "folder", proof=[record])
    assert [text.split(",")[0] for text in whole.later] == ["lora('loras/hot/hot.safetensors'"]
    afresh = drawn(opened(model, recipe))
    shutil.rmtree(home)
    for file in (tmp_path / "folder").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert str(tmp_path).encode() not in content, file
            assert b"home of mine" not in content, file
    assert "style.safetensors" in (tmp_path / "folder" / "vivace.json").read_text()
    assert "see style.safetensors" in (tmp_path / "folder" / "records.jsonl").read_text()
    moved = (tmp_path / "folder").rename(tmp_path / "elsewhere")
    assert np.array_equal(drawn(opened(moved)), afresh)


def test_other_versions_of_libraries_are_said(copy: Path) -> None:
    manifest(copy, lambda content: content["environment"]["libraries"].update(torch="2.0"))
    (note,) = [note for note in opened(copy).warnings if "last bits" in note]
    assert note.startswith("saved with torch 2.0, here ")


# Folders that are not what they say


def manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "vivace.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def as_written(folder: Path, *names: str) -> None:
    """Let `vivace.json` say that these files are as they were written."""
    manifest(
        folder,
        lambda content: content["files"].update(
            digests({name: folder / name for name in names}, in_pieces=True)
        ),
    )


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> None:
    with safe_open(str(path), "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, str(path), metadata=metadata)


UNET = "unet/vivace-00001-of-00001.safetensors"


def refusal(folder: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        opened(folder)
    message = str(refused.value)
    assert "\n" not in message
    return message


def without_a_row(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][1:].contiguous()


def of_integers(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.int32)


def no_number(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_a_row, "its scale has the shape"),
        (of_integers, "its scale is int32"),
        (no_number, "its scale has values that are no finite numbers"),
        (lambda tensors, name: tensors.pop(name), ".scale' is missing"),
        (
            lambda tensors, _: tensors.update({"extra.weight": torch.zeros(1)}),
            "the tensor 'extra.weight' is none of UNet2DConditionModel's",
        ),
    ],
)
def test_tensors_that_make_no_weights(copy: Path, change: Callable[..., object], says: str) -> None:
    names: list[str] = []

    def changed(tensors: dict[str, torch.Tensor], _: dict[str, str]) -> None:
        names.append(next(name for name in tensors if name.endswith(".scale")))
        change(tensors, names[0])

    rewrite(copy / UNET, changed)
    assert f"{UNET} is not the file that was saved" in refusal(copy)
    as_written(copy, UNET)
    message = refusal(copy)
    assert UNET in message
    assert says in message
    assert names[0].removesuffix(".scale") in message or "extra.weight" in message


def test_swapped_files(copy: Path) -> None:
    vae, encoder = (next((copy / part).glob("*.safetensors")) for part in ("vae", "text_encoder"))
    content = vae.read_bytes()
    vae.write_bytes(encoder.read_bytes())
    encoder.write_bytes(content)
    names = [path.relative_to(copy).as_posix() for path in (vae, encoder)]
    assert "is not the file that was saved" in refusal(copy)
    as_written(copy, *names)
    message = refusal(copy)
    assert any(str(path.parent) in message for path in (vae, encoder))
    assert "is missing" in message


def test_a_class_that_saved_models_do_not_have(copy: Path) -> None:
    def change(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata["vivace"] = metadata["vivace"].replace('"Int8WeightTensor"', '"os.system"')

    rewrite(copy / UNET, change)
    as_written(copy, UNET)
    message = refusal(copy)
    assert "'os.system'" in message
    assert UNET in message


def test_a_truncated_file(copy: Path) -> None:
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(copy)
    assert str(path) in message
    assert "truncated" in message


def test_another_architecture(copy: Path) -> None:
    config = copy / "unet" / "config.json"
    content = json.loads(config.read_text())
    content["layers_per_block"] += 1
    config.write_text(json.dumps(content))
    assert "unet/config.json is not the file that was saved" in refusal(copy)
    as_written(copy, "unet/config.json")
    assert "is missing" in refusal(copy)


def with_steps_stored(content: dict[str, Any]) -> None:
    content["recipe"]["techniques"].append({"name": "steps", "knobs": {"steps": 2}, "targets": []})
    content["stored"].append({"text": "steps(2)"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda content: content.update(format=3),
            "the key 'format' is 3, and this version of vivace reads up to 2",
        ),
        (lambda content: content.update(format=2, entry="sd-next"), "the key 'entry' names 'sd-next'"),
        (
            lambda content: content["recipe"]["techniques"][0].update(name="smaller_vae"),
            "the key 'recipe' cannot be applied: no technique 'smaller_vae'",
        ),
        (lambda content: content["defaults"].pop("width"), "the key 'defaults.width' must be given"),
        (with_steps_stored, "names 'steps(2)' under the key 'stored', which no recipe stores"),
        (lambda content: content.update(code="import os"), "the key 'code' is not known"),
    ],
)
def test_a_manifest_of_something_else(copy: Path, change: Callable[..., object], says: str) -> None:
    manifest(copy, change)
    assert says in refusal(copy)


def test_files_that_were_added_or_removed(copy: Path) -> None:
    (copy / "unet" / "more.safetensors").write_bytes((copy / "unet" / "config.json").read_bytes())
    assert "more.safetensors" in refusal(copy)
    (copy / "unet" / "more.safetensors").unlink()
    (copy / "tokenizer" / "tokenizer.json").unlink()
    assert "the key 'files' names 'tokenizer/tokenizer.json', which is not there" in refusal(copy)


# The command line


@pytest.mark.long
def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "quantize(int8)+steps(2)"
    assert typed(monkeypatch, "save", "tiny-sd", "small", "--recipe", recipe, "--device", "cpu") == 0
    out, err = capfd.readouterr()
    assert out.startswith("wrote small: tiny-sd with quantize(int8)+steps(2), ")
    assert "note: applied when it is loaded: steps(2)" in err
    assert "note: .vivace has no record of it; `vivace bench --model tiny-sd --recipe baseline" in err
    size = ["--height", "64", "--width", "64", "--device", "cpu"]
    assert typed(monkeypatch, "generate", "a star", "--model", "small", "-o", "a.png", *size) == 0
    assert "note: small is tiny-sd with quantize(int8)+steps(2)" in capfd.readouterr().err
    assert typed(monkeypatch, "generate", "a star", "--recipe", recipe, "-o", "b.png", *size) == 0
    from PIL import Image

    assert Image.open("a.png").text["recipe"] == "quantize(int8)+steps(2)"  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(Image.open("a.png")), np.asarray(Image.open("b.png")))
    capfd.readouterr()
    assert typed(monkeypatch, "plan", "small") == 0
    out, _ = capfd.readouterr()
    assert "quantize(int8)+steps(2)" in out
    assert "int8" in out
    assert typed(monkeypatch, "export", "--model", "small") == 2
    assert "was saved by `vivace save`" in capfd.readouterr().err


def test_a_recipe_is_checked_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        resolve("quantise(int8)")
    assert typed(monkeypatch, "save", "tiny-sd", str(tmp_path / "x"), "--recipe", "quantise(int8)") == 2
    assert not (tmp_path / "x").exists()


def test_a_folder_of_the_first_format_is_checked_by_whole_files(copy: Path) -> None:
    folder = copy
    whole = digests(saved_files(folder), in_pieces=False)
    manifest(folder, lambda content: content.update(format=1, files=whole))
    assert opened(folder).pipe is not None
    manifest(folder, lambda content: content["files"].update({UNET: "0" * 64}))
    assert f"{UNET} is not the file that was saved" in refusal(folder)
