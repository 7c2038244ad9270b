"""LoRAs on a hub, and files that nobody would give: each is found, or refused with a reason."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vivace
from tests.families import build
from tests.hub_server import Hub, Repository, commit_of
from vivace.errors import Unsupported, UnusableModel, VivaceError
from vivace.machinery.lora.lora_files import locate_lora, on_hub
from vivace.machinery.lora.read_lora import merge, read_lora

OURS = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"


@pytest.fixture
def served(client: Hub, tmp_path: Path) -> Hub:
    single, several = tmp_path / "one", tmp_path / "several"
    for folder in (single, several):
        (folder / "sub").mkdir(parents=True)
        (folder / "README.md").write_text("a LoRA")
        (folder / "old.bin").write_bytes(b"never to be fetched")
    shutil.copy(OURS, single / "ink.safetensors")
    for name in ("a.safetensors", "sub/b-c.safetensors"):
        shutil.copy(OURS, several / name)
    client.repositories["org/ink"] = Repository({"main": single, "v2": several})
    client.repositories["org/several"] = Repository({"main": several})
    return client


def test_a_repository_or_one_of_its_files_is_a_lora(served: Hub) -> None:
    for text, name in (
        ("org/ink", "ink.safetensors"),
        ("org/several/a.safetensors", "a.safetensors"),
        ("org/several/sub/b-c.safetensors", "b-c.safetensors"),
        ("org/ink/a.safetensors@v2", "a.safetensors"),
        (f"org/ink/a.safetensors@{commit_of('v2')}", "a.safetensors"),
    ):
        lora = locate_lora(text)
        assert (lora.name, lora.read_bytes()) == (name, OURS.read_bytes())
    assert "old.bin" not in served.files
    num_requests = len(served.requests)
    locate_lora(f"org/ink/a.safetensors@{commit_of('v2')}")
    assert len(served.requests) == num_requests, "it is in the cache"
    session = vivace.apply(build("sd"), "lora('org/ink', 0.5)")
    assert session.effects["lora(ink)"]["denoiser.merged_layers"]


def test_pefts_json_comes_with_its_adapter_and_with_no_other_file(served: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    layer = "mid_block.attentions.0.proj_in"
    width = build("sd").unet.get_submodule(layer).weight.shape[0]
    matrices = {"lora_A.weight": torch.ones(2, width), "lora_B.weight": torch.ones(width, 2)}
    for name, start in (("adapter_model", "base_model.model"), ("renamed", "unet")):
        state = {f"{start}.{layer}.{role}": matrix.clone() for role, matrix in matrices.items()}
        save_file(state, folder / f"{name}.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16}))
    served.repositories["org/adapter"] = Repository({"main": folder})

    def scale(text: str) -> float:
        matrices = read_lora(build("sd"), locate_lora(text)).layers["denoiser"][layer].matrices
        assert matrices is not None
        return matrices.scale

    assert scale("org/adapter/renamed.safetensors") == 1
    assert "adapter_config.json" not in served.files
    assert scale("org/adapter") == 8
    assert scale("org/adapter/adapter_model.safetensors") == 8


def test_a_lora_that_is_not_there_is_refused_with_a_reason(served: Hub) -> None:
    with pytest.raises(UnusableModel, match=r"has 2 files in \.safetensors format .*give one file"):
        locate_lora("org/several")
    with pytest.raises(Unsupported, match="has no nothing"):
        locate_lora("org/ink/nothing.safetensors")
    with pytest.raises(Unsupported, match="no repository of that name"):
        locate_lora("org/absent")
    with pytest.raises(Unsupported, match="has no revision 'v9'"):
        locate_lora("org/ink@v9")
    assert on_hub("../up/x.safetensors") is None
    assert on_hub("/abs/x.safetensors") is None


def test_damaged_files_raise_vivaces_own_errors(tmp_path: Path) -> None:
    """Bytes of a good file are changed in its header, and the file is cut."""
    good, pipe, path = OURS.read_bytes(), build("sd"), tmp_path / "x.safetensors"
    rng = random.Random(3)
    outcomes = set()
    for _ in range(60):
        content = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(8, 3000)] = rng.randrange(32, 127)
        path.write_bytes(content[: rng.choice([len(content), len(content), rng.randrange(len(content))])])
        try:
            merge(pipe, path)
            outcomes.add("merged")  # the change was to a training note
        except VivaceError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes
