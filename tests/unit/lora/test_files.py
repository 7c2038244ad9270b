"""LoRAs on a hub, and files that nobody would give: each is found, or refused with a reason."""

import random
import shutil
from pathlib import Path

import pytest

import vivace
from tests.families import build
from tests.hub_server import Hub, Repository, commit_of
from vivace.errors import Unsupported, UnusableModel, VivaceError
from vivace.lora.files import locate_lora, on_hub
from vivace.lora.merge import merge

OURS = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"


@pytest.fixture
def served(client: Hub, tmp_path: Path) -> Hub:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder in (one, several):
        (folder / "sub").mkdir(parents=True)
        (folder / "README.md").write_text("a LoRA")
        (folder / "old.bin").write_bytes(b"never to be fetched")
    shutil.copy(OURS, one / "ink.safetensors")
    for name in ("a.safetensors", "sub/b-c.safetensors"):
        shutil.copy(OURS, several / name)
    client.repositories["org/ink"] = Repository({"main": one, "v2": several})
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
        found = locate_lora(text)
        assert (found.name, found.read_bytes()) == (name, OURS.read_bytes())
    assert "old.bin" not in served.files
    asked = len(served.asked)
    locate_lora(f"org/ink/a.safetensors@{commit_of('v2')}")
    assert len(served.asked) == asked, "it is in the cache"
    session = vivace.apply(build("sd"), "lora('org/ink', 0.5)")
    assert session.effects["lora(ink)"]["denoiser.merged_layers"]


def test_what_is_not_there_is_said(served: Hub) -> None:
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
