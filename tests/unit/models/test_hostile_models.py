"""Models that somebody else made: refused in words before a library builds anything from them."""

import inspect
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import transformers

from vivace.errors import UnknownModel, UnusableModel
from vivace.models import find_model, find_scorer
from vivace.models.bounds import check_numbers
from vivace.models.checkpoints.headers import read_header
from vivace.models.find import WEIGHTS
from vivace.runtime.memory.weightless import find_weightless


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WEIGHTS / "tiny-sd", tmp_path / "model", copy_function=_link_weights))


def _link_weights(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path) -> str:
    """What `generate`, `bench` and `plan` alike say, before torch is imported."""
    with pytest.raises(UnusableModel) as by_generate:
        find_model(str(folder))
    with pytest.raises(UnusableModel) as by_plan:
        find_weightless(str(folder))
    assert str(by_generate.value) == str(by_plan.value)
    return str(by_generate.value)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("unet/config.json", "layers_per_block", 10**6),
        ("unet/config.json", "norm_num_groups", 0),
        ("unet/config.json", "attention_head_dim", 0),
        ("unet/config.json", "block_out_channels", [32, 10**9]),
        ("unet/config.json", "block_out_channels", [32] * 5000),
        ("unet/config.json", "sample_size", 10**39),
        ("unet/config.json", "cross_attention_dim", "128"),
        ("unet/config.json", "num_attention_heads", 0),
        ("unet/config.json", "some_other_number", 10**30),
        ("vae/config.json", "latent_channels", -4),
        ("text_encoder/config.json", "num_hidden_layers", 10**6),
        ("text_encoder/config.json", "max_position_embeddings", 10**9),
        ("text_encoder/config.json", "vocab_size", 10**12),
        ("text_encoder/config.json", "hidden_size", 0),
        ("scheduler/scheduler_config.json", "num_train_timesteps", 10**9),
        ("scheduler/scheduler_config.json", "steps_offset", -1),
        ("tokenizer/tokenizer_config.json", "model_max_length", -1),
        ("tokenizer/tokenizer_config.json", "model_max_length", "77"),
        ("tokenizer/tokenizer_config.json", "model_max_length", 1e30),
        ("tokenizer/tokenizer_config.json", "model_max_length", 2**62),
    ],
    ids=lambda value: str(value)[:24],
)
def test_numbers_that_no_model_has(model: Path, file: str, key: str, value: Any) -> None:
    edit(model / file, **{key: value})
    message = refused(model)
    assert f"{model / file} cannot be used: its {key} " in message


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("model_index.json", "[" * 100_000, "nest deeper than 64"),
        ("model_index.json", '{"a":' * 500 + "1" + "}" * 500, "nest deeper than 64"),
        ("unet/config.json", '{"a":' * 100 + "1" + "}" * 100, "nest deeper than 64"),
        ("unet/config.json", f'{{"sample_size": {"9" * 400}}}', "an integer of 400 digits"),
        ("unet/config.json", f'{{"sample_size": {"9" * 5000}}}', "an integer of 5000 digits"),
        ("unet/config.json", "[]", "holds a JSON list, not an object"),
        ("unet/config.json", "\udcff", "not UTF-8 text"),
        ("scheduler/scheduler_config.json", "{", "is not JSON"),
    ],
)
def test_json_that_is_none(model: Path, file: str, text: str, says: str) -> None:
    (model / file).write_text(text, errors="surrogateescape")
    assert says in refused(model)
    assert str(model / file) in refused(model)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/etc/hostname"), "link out of"),
        (lambda path: path.symlink_to("../unet/config.json"), None),
        (
            lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**10),
            "at most 32,000,000 are read",
        ),
    ],
    ids=["device", "pipe", "outside", "inside", "huge"],
)
def test_files_that_are_none(model: Path, make: Callable[[Path], None], says: str | None) -> None:
    path = model / "scheduler" / "scheduler_config.json"
    path.unlink()
    make(path)
    if says is None:
        find_model(str(model))
    else:
        assert says in refused(model)


def test_a_component_that_is_a_link(model: Path) -> None:
    (model / "scheduler").rename(model.parent / "elsewhere")
    (model / "scheduler").symlink_to(model.parent / "elsewhere")
    assert "scheduler is a link" in refused(model)


@pytest.mark.parametrize(
    "target", ["../../evil.bin", "/tmp/evil.safetensors", "model.bin", "../x.safetensors", 7]
)
@pytest.mark.parametrize("part", ["text_encoder", "unet"])
def test_no_index_leads_out_of_the_folder(model: Path, part: str, target: Any) -> None:
    stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    index = model / part / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": target}}))
    assert f"{index} cannot be used: it names {str(target)!r}" in refused(model)


def test_no_component_leads_out_of_the_folder(model: Path) -> None:
    edit(model / "model_index.json", **{"../other": ["diffusers", "DDIMScheduler"]})
    assert "a component named '../other'" in refused(model)


@pytest.mark.parametrize("library", ["os", "subprocess", "antigravity", "idlelib.idle", "diffusers.utils"])
def test_classes_come_from_diffusers_and_transformers(model: Path, library: str) -> None:
    edit(model / "model_index.json", scheduler=[library, "Popen"])
    assert f"takes its scheduler from the library '{library}'" in refused(model)


def test_a_quantised_model_is_refused_in_words(model: Path) -> None:
    edit(model / "unet" / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert "quantised already (quantization_config in unet/config.json)" in refused(model)


def test_adapters_and_other_models_are_not_loaded(model: Path) -> None:
    edit(model / "text_encoder" / "config.json", backbone_config={"use_pretrained_backbone": True})
    assert "loads another model" in refused(model)
    (model / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert "has an adapter (text_encoder/adapter_config.json)" in refused(model)


def _header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (_header(x={"dtype": "F32", "data_offsets": [0, 8]}), "no valid shape"),
        (b'{"x": ' + json.dumps(ONE).encode() + b', "x": ' + json.dumps(ONE).encode() + b"}", "'x' twice"),
        (_header(x=ONE, y=ONE), "overlap, or leave gaps"),
        (_header(x=ONE | {"data_offsets": [4, 12]}), "overlap, or leave gaps"),
        (_header(x=ONE | {"shape": [3]}), "does not fit its offsets"),
        (_header(x=ONE | {"shape": [-2]}), "no valid shape"),
        (_header(x=ONE | {"shape": [10**39]}), "does not fit its offsets"),
        (_header(x=ONE | {"dtype": "Q4"}), "no known dtype"),
        (_header(x=[1]), "no known dtype"),
        (_header(), "no tensors"),
        (b"[]", "damaged"),
        (b"[" * 5000, "nest deeper"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: bytes, says: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(UnusableModel, match=says):
        read_header(path)


def test_a_header_that_claims_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**10))
        file.truncate(2 * 10**10)
    with pytest.raises(UnusableModel, match="damaged"):
        read_header(path)


@pytest.mark.parametrize(
    ("file", "key", "value", "says"),
    [
        ("config.json", "vocab_size", 10**12, "its vocab_size"),
        ("config.json", "auto_map", {"AutoModel": "x.Y"}, "auto_map in config.json"),
        ("processor_config.json", "size", {"shortest_edge": 10**9}, "its shortest_edge"),
        ("tokenizer_config.json", "model_max_length", -5, "its model_max_length"),
    ],
)
def test_scorers_are_checked_too(tmp_path: Path, file: str, key: str, value: Any, says: str) -> None:
    clip = shutil.copytree(WEIGHTS / "tiny-clip", tmp_path / "clip")
    content = json.loads((clip / file).read_text())
    place = content.get("image_processor", content)
    place[key] = value
    (clip / file).write_text(json.dumps(content))
    with pytest.raises(UnknownModel, match=says):
        find_scorer(str(clip))


def test_a_scorer_whose_configuration_is_elsewhere(tmp_path: Path) -> None:
    clip = shutil.copytree(WEIGHTS / "tiny-clip", tmp_path / "clip")
    (clip / "config.json").rename(tmp_path / "config.json")
    (clip / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UnusableModel, match="link out of"):
        find_scorer(str(clip))


def test_the_embedded_scorer_has_a_name() -> None:
    assert find_scorer("embedded") == find_scorer("tiny-clip")


def test_a_model_of_a_user_that_does_not_exist() -> None:
    with pytest.raises(UnknownModel, match="no model '~nobody-here/x'"):
        find_model("~nobody-here/x")
    with pytest.raises(UnknownModel, match="no scorer '~nobody-here/x'"):
        find_scorer("~nobody-here/x")


@pytest.mark.long
def test_published_configurations_are_within_the_bounds() -> None:
    """The defaults of every architecture are those of a published model."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING.values()
    without_defaults: dict[str, str] = {}
    for kind in kinds:
        try:
            config = kind().to_dict()
        except Exception as error:  # noqa: BLE001  some need arguments, others libraries that are not here
            without_defaults[kind.__name__] = repr(error)
            continue
        check_numbers(json.loads(json.dumps(config, default=str)))
    assert len(without_defaults) < 0.1 * len(kinds), without_defaults
    num_checked = 0
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None)
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin | diffusers.SchedulerMixin):
            check_numbers(_defaults(kind))
            num_checked += 1
    assert num_checked > 50


def _defaults(kind: Any) -> dict[str, Any]:
    parameters = inspect.signature(kind.__init__).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    return dict(json.loads(json.dumps(defaults, default=str)))
