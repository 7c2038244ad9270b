"""Scorers by name, by folder, and from a hub on this machine, asked by the hub's own client."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.hub_server import Hub, Repository, client_of
from tinyworld import clip
from vivace.errors import UnknownModel
from vivace.measure.scorer import ClipScorer
from vivace.models import find_scorer, scorers
from vivace.models.find import WEIGHTS

FILES = {
    "config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
ASK = """
import json, sys
from vivace.errors import VivaceError
from vivace.models.scorers import find_scorer

try:
    found = find_scorer(sys.argv[1], download=sys.argv[2] == "True")
except VivaceError as error:
    print(json.dumps({"code": error.exit_code, "message": str(error)}))
else:
    print(json.dumps({"name": found.name, "revision": found.revision, "folder": str(found.folder)}))
assert "torch" not in sys.modules, "benchmarks' parent process calls this"
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of tiny-clip's shape with random weights, and beside it what other libraries would load."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("made") / "clip"
    clip.save(folder, clip.build())
    for name in (
        "pytorch_model.bin",
        "flax_model.msgpack",
        "tf_model.h5",
        "model.fp16.safetensors",
        "code.py",
    ):
        (folder / name).write_bytes(b"never to be fetched")
    return folder


@pytest.fixture
def hub(hub: Hub, made: Path) -> Hub:
    hub.repositories["org/clip"] = Repository({"main": made})
    return hub


def ask(name: str, hub: Hub | str, home: Path, download: bool = True, **variables: str) -> dict[str, Any]:
    """find_scorer in a process of its own: the client reads its environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, name, str(download)],
        env=client_of(hub, home, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bars where there is no terminal, no log of the client's, no warning"
    return dict(json.loads(done.stdout))


def test_a_repository_becomes_a_scorer(hub: Hub, home: Path, made: Path) -> None:
    answer = ask("org/clip", hub, home)
    assert answer["name"] == "org/clip"
    folder = Path(answer["folder"])
    assert {path.name for path in folder.iterdir()} == FILES
    assert hub.files == FILES
    picture = Image.new("RGB", (64, 64), "red")
    fetched, original = ClipScorer(folder), ClipScorer(made)
    assert fetched.scores([picture], ["a red circle"]) == original.scores([picture], ["a red circle"])
    assert answer["revision"] == find_scorer(str(made)).revision, "the same files, wherever they came from"


def test_a_cached_copy_needs_no_network(hub: Hub, home: Path) -> None:
    first = ask("org/clip", hub, home)
    num_requests = len(hub.requests)
    assert ask("org/clip", hub, home) == first
    assert ask("org/clip", hub, home, HF_HUB_OFFLINE="1") == first
    assert len(hub.requests) == num_requests


@pytest.mark.long
def test_what_is_no_clip_in_safetensors_is_not_fetched(
    hub: Hub, home: Path, made: Path, tmp_path: Path
) -> None:
    folders = {
        name: Path(shutil.copytree(made, tmp_path / name)) for name in ("pickled", "bert", "bare", "huge")
    }
    (folders["pickled"] / "model.safetensors").unlink()
    (folders["bert"] / "config.json").write_text('{"model_type": "bert"}')
    for name in FILES - {"model.safetensors"}:
        (folders["bare"] / name).unlink()
    hub.repositories |= {f"org/{name}": Repository({"main": folder}) for name, folder in folders.items()}
    hub.repositories["org/huge"].claims["model.safetensors"] = 10**15
    for name, code, says in (
        ("org/pickled", 2, "org/pickled has no model.safetensors; vivace loads no pickles"),
        ("org/bert", 2, "org/bert is not a CLIP model"),
        ("org/bare", 2, "org/bare has no config.json"),
        ("org/huge", 3, "org/huge needs 1000000.00 GB, and"),
    ):
        answer = ask(name, hub, home)
        assert answer.get("code") == code, answer
        assert says in answer["message"]
    assert not list(home.rglob("model.safetensors"))
    assert set(hub.requests) & {"pytorch_model.bin", "flax_model.msgpack", "tf_model.h5", "code.py"} == set()


def test_answers_that_are_not_the_hubs(hub: Hub, home: Path) -> None:
    for status, headers, content, says in (
        (
            200,
            {"Content-Type": "text/html"},
            b"<html>Log in to the hotel's network",
            "could not be downloaded",
        ),
        (200, {"Content-Type": "application/json"}, b"[]", "could not be downloaded"),
        (500, {}, b"", "answered 500"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"", "your token"),
    ):
        hub.answer = (status, headers, content)
        answer = ask("org/clip", hub, home / str(len(content)), HF_TOKEN="hf_none")
        assert answer["code"] == 3, answer
        assert says in answer["message"]
        assert "hf_none" not in answer["message"]


def test_a_cache_that_cannot_be_written(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("a file")
    answer = ask("org/clip", hub, home)
    assert answer["code"] == 3
    assert "org/clip cannot be stored" in answer["message"]
    assert "HF_HOME" in answer["message"]


def test_embedded_scorers_have_names(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path / "tiny-clip")
    shutil.copytree(WEIGHTS / "tiny-sd", tmp_path / "tiny-sd")
    monkeypatch.setattr(scorers, "WEIGHTS", tmp_path)
    scorer = find_scorer(" Tiny-CLIP ")
    assert (scorer.name, scorer.folder) == ("tiny-clip", tmp_path / "tiny-clip")
    assert scorer.id == f"tiny-clip@{find_scorer(str(made)).revision}"
    with pytest.raises(UnknownModel, match=r"did you mean 'tiny-clip'\? \(give tiny-clip, the folder of"):
        find_scorer("tiny-clop")
    with pytest.raises(UnknownModel, match="no scorer 'tiny-sd'"):
        find_scorer("tiny-sd")


def test_folders(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "org" / "clip"))
    monkeypatch.chdir(tmp_path)
    scorer = find_scorer("org/clip")
    assert (scorer.name, scorer.folder) == (str(copy), copy), "a folder comes before the hub"
    for name in (
        "org",
        "org/clip/config.json",
        "./nowhere",
        "org/a/b",
        "",
        "a\0b",
        "m" * 5000,
        "org/clip@../../x",
    ):
        with pytest.raises(UnknownModel):
            find_scorer(name)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(content))
    assert find_scorer("org/clip").revision != scorer.revision
    encoder = WEIGHTS / "tiny-sd" / "text_encoder"
    with pytest.raises(UnknownModel, match="text_encoder is not a CLIP model"):
        find_scorer(str(encoder))
    (copy / "model.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"has no model\.safetensors; vivace loads no pickles"):
        find_scorer("org/clip")
