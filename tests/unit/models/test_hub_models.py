"""Models on a hub: what is fetched and what never is, the cache, revisions, each failure in words."""

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

import vivace
from tests.hub_server import Hub, Repository, client_of, commit_of, serve
from vivace.errors import Unsupported, UnusableModel, VivaceError, WorkloadError
from vivace.models import find_model, load_pipeline, obtain
from vivace.models.find import WEIGHTS
from vivace.runtime.workloads import checked_request

PROMPT = "a red circle above a blue square"
UNET = "unet/diffusion_pytorch_model.safetensors"
FILES = {path.relative_to(WEIGHTS / "tiny-sd").as_posix() for path in (WEIGHTS / "tiny-sd").rglob("*.*")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny-sd as a repository, with what else lies in such repositories."""
    folder = Path(shutil.copytree(WEIGHTS / "tiny-sd", tmp_path / "repository"))
    for name in (
        "README.md",
        "whole.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.non_ema.safetensors",
        "unet/diffusion_pytorch_model.fp16.bin",
        "unet/model.onnx",
        "unet/code.py",
        "text_encoder/pytorch_model.bin",
        "text_encoder/flax_model.msgpack",
        "safety_checker/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never to be fetched")
    return folder


@pytest.fixture
def served(client: Hub, folder: Path) -> Hub:
    client.repositories["org/model"] = Repository({"main": folder})
    return client


def draw(model: str) -> np.ndarray:
    session = vivace.load(model, device="cpu")
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "np"}
    return np.asarray(session(PROMPT, generator=generator, **call).images)


def test_a_hub_model_draws_what_the_folder_draws(served: Hub) -> None:
    expected = draw(str(WEIGHTS / "tiny-sd"))
    assert np.array_equal(draw("org/model"), expected)
    assert served.files == FILES, "each once, nothing else"
    assert (
        max(n for name, n in served.sent.items() if name == UNET)
        == (WEIGHTS / "tiny-sd" / UNET).stat().st_size
    )


def test_weights_wait_until_somebody_wants_to_draw(served: Hub) -> None:
    located = find_model("org/model")
    assert (located.model.name, located.model.source) == ("org/model", "hub")
    assert located.model.revision == commit_of("main")[:12]
    assert located.defaults["height"] == 128
    assert located.defaults["guidance_scale"] == 7.5
    assert {name for name in served.files if name.endswith(".safetensors")} == set()
    with pytest.raises(WorkloadError):
        checked_request("org/model", "baseline", height=100)
    assert UNET not in served.files, "not for a question that cannot be asked"
    complete = obtain(located)
    assert complete.model == located.model
    assert not complete.downloads
    assert UNET in served.files


def test_the_cache_needs_no_network(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    obtained = obtain(find_model("org/model"))
    num_requests = len(served.requests)
    assert find_model("org/model") == obtained
    assert find_model("org/model", download=False) == obtained
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_pipeline(find_model("org/model"), "cpu").unet is not None
    assert len(served.requests) == num_requests


def test_what_another_program_cached_is_enough(
    served: Hub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a client too old to note what the repository has."""
    snapshot = home / "hub" / "models--org--model" / "snapshots" / commit_of("main")
    for name in FILES:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, snapshot / name)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit_of("main"))
    assert load_pipeline(find_model("org/model"), "cpu").unet is not None
    assert served.requests == []
    (snapshot / UNET).unlink()
    assert load_pipeline(find_model("org/model"), "cpu").unet is not None
    assert served.files == {UNET}, "the rest stays"


def test_revisions_of_a_model(served: Hub, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = other / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace("trailing", "leading"))
    served.repositories["org/model"] = Repository({"main": folder, "refs/pr/7": other, "v1.0": other})
    main, proposed = find_model("org/model"), find_model("org/model@refs/pr/7")
    assert proposed.model.name == "org/model@refs/pr/7"
    assert proposed.model.revision == commit_of("refs/pr/7")[:12] != main.model.revision
    assert find_model("org/model@v1.0").model.revision == commit_of("v1.0")[:12]
    by_commit = find_model(f"org/model@{commit_of('main')}")
    assert by_commit.folder == main.folder
    spacings = {load_pipeline(f, "cpu").scheduler.config.timestep_spacing for f in (main, proposed)}
    assert spacings == {"trailing", "leading"}
    with pytest.raises(Unsupported, match="org/model has no revision 'v2'; give one of its branches"):
        find_model("org/model@v2")


def test_the_smaller_variant_is_fetched_where_there_is_one(served: Hub, folder: Path) -> None:
    for name in ("unet/diffusion_pytorch_model", "text_encoder/model"):
        shutil.copy(folder / f"{name}.safetensors", folder / f"{name}.fp16.safetensors")
    obtained = obtain(find_model("org/model"))
    assert obtained.variant == "fp16"
    weights = {name for name in served.files if name.endswith(".safetensors")}
    assert weights == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.fp16.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }
    assert {path.relative_to(obtained.folder).as_posix() for path in obtained.weights} == weights
    assert load_pipeline(obtained, "cpu").dtype == torch.float32


def test_model_repositories_that_cannot_be_had(served: Hub, folder: Path) -> None:
    served.repositories |= {
        "org/gated": Repository({"main": folder}, refuse=(401, "GatedRepo")),
        "org/asked": Repository({"main": folder}, refuse=(403, "GatedRepo")),
        "org/forbidden": Repository({"main": folder}, refuse=(403, "")),
    }
    for name, says in (
        ("org/nothing", f"no repository of that name on {served.url}; check the spelling, or log in"),
        (
            "org/gated",
            f"org/gated is gated: ask for access at {served.url}/org/gated, then log in with `hf auth",
        ),
        ("org/asked", "org/asked is gated"),
        ("org/forbidden", "forbids access to org/forbidden; give your token read access to it"),
    ):
        with pytest.raises(Unsupported, match=re.escape(says)) as caught:
            find_model(name)
        assert caught.value.exit_code == 3


def test_repositories_that_are_no_model(served: Hub, folder: Path, tmp_path: Path) -> None:
    names = ("pickled", "bare", "lora", "coded", "video", "half", "teacher")
    folders = {name: Path(shutil.copytree(folder, tmp_path / name)) for name in names}
    for name in ("pickled", "half"):
        (folders[name] / UNET.replace("model.", "model.non_ema.")).unlink()
    (folders["pickled"] / UNET).unlink()
    (folders["teacher"] / UNET).unlink()
    (folders["bare"] / "model_index.json").unlink()
    shutil.rmtree(folders["lora"])
    (folders["lora"]).mkdir()
    (folders["lora"] / "README.md").write_text("")
    index = json.loads((folder / "model_index.json").read_text())
    coded, video = index | {"_class_name": ["my", "Pipe"]}, index | {"_class_name": "WanPipeline"}
    (folders["coded"] / "model_index.json").write_text(json.dumps(coded))
    (folders["video"] / "model_index.json").write_text(json.dumps(video))
    (folders["half"] / UNET).rename(folders["half"] / UNET.replace("model.", "model-00001-of-00002."))
    served.repositories |= {f"org/{name}": Repository({"main": path}) for name, path in folders.items()}
    for name, says in (
        (
            "pickled",
            "has no safetensors for its unet, only diffusion_pytorch_model.bin; vivace loads no pickles",
        ),
        (
            "bare",
            "`hf download org/bare whole.safetensors`, and give its path",
        ),
        (
            "lora",
            "org/lora has no model_index.json, so it is not a pipeline in diffusers' format; give one that is",
        ),
        ("coded", "needs its own code (['my', 'Pipe']); vivace runs no code from models"),
        ("video", "org/video is a WanPipeline, which is not a text-to-image pipeline"),
        ("half", "has only some of its unet's weight files"),
        ("teacher", "has its unet only as non_ema"),
    ):
        with pytest.raises(UnusableModel, match=re.escape(says)) as caught:
            find_model(f"org/{name}")
        assert caught.value.exit_code == 3
    assert {name for name in served.files if not name.endswith((".json", ".txt"))} == set(), (
        "no weights, no code"
    )


def test_too_little_disk_is_known_before_anything_large_is_fetched(served: Hub) -> None:

    def tiny_disk(path: Path) -> Any:
        return shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", tiny_disk)
        with pytest.raises(
            Unsupported, match=r"org/model needs 0\.01 GB, and 0\.00 GB are free .* set HF_HOME"
        ):
            checked_request("org/model", "baseline")
    assert served.sent[UNET] == 0
    checked_request("org/model", "baseline")


def test_a_cached_file_that_was_cut_short(served: Hub) -> None:
    obtained = obtain(find_model("org/model"))
    blob = (obtained.folder / UNET).resolve()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-100])
    with pytest.raises(UnusableModel) as caught:
        checked_request("org/model", "baseline")
    assert f"is truncated: {len(whole) - 100:,} bytes, not {len(whole):,}" in str(caught.value)
    advice = re.search(r"delete (\S+); the next run downloads it again", str(caught.value))
    assert advice
    Path(advice.group(1)).unlink()
    checked_request("org/model", "baseline")
    assert (obtained.folder / UNET).read_bytes() == whole


def test_an_interrupted_download_keeps_what_arrived(
    served: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = served.repositories["org/model"]
    repository.cuts[UNET] = 100_000
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(
        Unsupported, match=r"org/model could not be downloaded from .* check the network and try again"
    ):
        checked_request("org/model", "baseline")
    assert served.sent[UNET] > 100_000, "the client tries more than once"
    assert not list(home.rglob("*.incomplete"))
    repository.cuts.clear()
    others = {name: served.sent[name] for name in served.sent if name != UNET}
    assert load_pipeline(find_model("org/model"), "cpu").unet is not None
    assert {name: served.sent[name] for name in others} == others, "none of them again"


def test_a_broken_connection_is_resumed(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (WEIGHTS / "tiny-sd" / UNET).stat().st_size
    served.repositories["org/model"].cuts[UNET] = size // 3 + 1
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    checked_request("org/model", "baseline")
    assert size <= served.sent[UNET] < size + 3 * 100_000, "in parts; of each at most the last chunk again"


def test_a_model_without_a_network(client: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    with pytest.raises(
        Unsupported, match=f"org/model could not be downloaded from {gone.url} .* check the network"
    ):
        find_model("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unsupported, match="org/model is not in the local cache, and HF_HUB_OFFLINE forbids"):
        find_model("org/model")
    with pytest.raises(Unsupported, match=r"base-1\.0 is not in the local cache, and HF_HUB_OFFLINE"):
        find_model("sdxl")


ASK = """
import json, sys
from vivace.errors import VivaceError
from vivace.models.find import find_model, obtain

try:
    found = obtain(find_model(sys.argv[1]))
except VivaceError as error:
    print(json.dumps({"code": error.exit_code, "message": str(error)}))
else:
    print(json.dumps({"revision": found.model.revision, "folder": str(found.folder)}))
assert "torch" not in sys.modules, "benchmarks' parent process calls this"
"""


def ask(hub: Hub, home: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK, "org/model"],
        env=client_of(hub, home, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once(hub: Hub, home: Path, folder: Path) -> None:
    hub.repositories["org/model"] = Repository({"main": folder})
    asking = [ask(hub, home) for _ in range(2)]
    answers = []
    for process in asking:
        out, err = process.communicate(timeout=120)
        assert err == "", "no bars where there is no terminal, no log of the client's, no warning"
        answers.append(json.loads(out))
    assert answers[0] == answers[1]
    fetched = Path(answers[0]["folder"])
    assert all((fetched / name).read_bytes() == (folder / name).read_bytes() for name in FILES)
    assert not list(home.rglob("*.incomplete"))


def test_a_disk_that_fills_up_while_a_model_is_fetched(hub: Hub, home: Path, folder: Path) -> None:
    """A limit on the size of files fails as a full disk does: in the middle of one."""
    hub.repositories["org/model"] = Repository({"main": folder})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        out, _ = ask(hub, home).communicate(timeout=120)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    answer = json.loads(out)
    assert answer["code"] == 3
    assert "org/model cannot be stored" in answer["message"]
    assert "File too large" in answer["message"]
    again, _ = ask(hub, home).communicate(timeout=120)
    assert json.loads(again)["revision"] == commit_of("main")[:12], "goes on when there is room"


def test_errors_are_ours(served: Hub) -> None:
    served.answer = (200, {"Content-Type": "text/html"}, b"<html>Log in to the hotel's network")
    with pytest.raises(VivaceError, match="could not be downloaded"):
        find_model("org/other")
