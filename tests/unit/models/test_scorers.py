"""Scorers by name, by folder, and from a hub on this machine, asked by the hub's own client."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.hub_server import Hub, Repository, client_of, commit_of, serve
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
    assert ask("org/clip", hub, home, download=False) == first
    assert ask("org/clip", hub, home, HF_HUB_OFFLINE="1") == first
    assert len(hub.requests) == num_requests


def test_what_other_programs_cached_is_completed(hub: Hub, home: Path, made: Path) -> None:
    snapshot = home / "hub" / "models--org--clip" / "snapshots" / commit_of("main")
    snapshot.mkdir(parents=True)
    shutil.copy(made / "config.json", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit_of("main"))
    partial = ask("org/clip", hub, home, download=False)
    assert partial["code"] == 3
    assert "not in the local cache" in partial["message"]
    assert hub.requests == []
    assert ask("org/clip", hub, home)["folder"] == str(snapshot)
    (snapshot / "extra.json").write_text("{}")
    assert ask("org/clip", hub, home)["revision"] == find_scorer(str(made)).revision, (
        "others' files are theirs"
    )


def test_revisions_of_a_scorer(hub: Hub, home: Path, made: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made, tmp_path / "other"))
    torch.manual_seed(1)
    clip.save(other, clip.build())
    hub.repositories["org/clip"] = Repository({"main": made, "refs/pr/7": other})
    main, proposed = ask("org/clip", hub, home), ask("org/clip@refs/pr/7", hub, home)
    assert proposed["name"] == "org/clip@refs/pr/7"
    assert proposed["revision"] == find_scorer(str(other)).revision != main["revision"]
    commit = ask(f"org/clip@{commit_of('main')}", hub, home)
    assert commit["folder"] == main["folder"]
    missing = ask("org/clip@v2", hub, home)
    assert missing["code"] == 3
    assert "org/clip has no revision 'v2'" in missing["message"]


@pytest.mark.long
def test_scorer_repositories_that_cannot_be_had(hub: Hub, home: Path, made: Path, tmp_path: Path) -> None:
    hub.repositories |= {
        "org/gated": Repository({"main": made}, refuse=(401, "GatedRepo")),
        "org/asked": Repository({"main": made}, refuse=(403, "GatedRepo")),
        "org/forbidden": Repository({"main": made}, refuse=(403, "")),
    }
    for name, code, says in (
        ("org/nothing", 3, f"there is no folder 'org/nothing', and no repository of that name on {hub.url}"),
        ("org/gated", 3, f"org/gated is gated: ask for access at {hub.url}/org/gated, then log in"),
        ("org/asked", 3, "org/asked is gated"),
        ("org/forbidden", 3, "forbids access to org/forbidden; give your token read access to it"),
        ("org/clip.git", 2, "no repository 'org/clip.git'"),
    ):
        answer = ask(name, hub, home)
        assert answer.get("code") == code, answer
        assert says in answer["message"]


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


def test_a_scorer_without_a_network(home: Path) -> None:
    with serve() as gone:
        pass
    answer = ask("org/clip", gone, home)
    assert answer["code"] == 3
    assert f"org/clip could not be downloaded from {gone.url}" in answer["message"]
    assert "check the network" in answer["message"]
    forbidden = ask("org/clip", gone, home, HF_HUB_OFFLINE="1")
    assert forbidden["code"] == 3
    assert "HF_HUB_OFFLINE forbids the network" in forbidden["message"]


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


@pytest.mark.long
def test_a_disk_that_fills_up_while_a_scorer_is_fetched(hub: Hub, home: Path) -> None:
    """A limit on the size of files fails as a full disk does: in the middle of one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        answer = ask("org/clip", hub, home)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer["code"] == 3
    assert "org/clip cannot be stored" in answer["message"]
    assert "File too large" in answer["message"]
    assert ask("org/clip", hub, home)["name"] == "org/clip", "and goes on when there is room"


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
