"""What is wrong at start: one error in words each, and nothing is loaded."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hub_server import Repository, client_of
from tests.hub_server import serve as serve_hub
from vivace.cli.serve import _check_installed
from vivace.errors import Unsupported, UsageError
from vivace.serve.settings import folder_of_loras, lora_files

SERVE = (sys.executable, "-m", "vivace", "serve")
GB = 10**9


def error_of(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run the command; return its status and its one error."""
    done = subprocess.run(
        [*SERVE, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | variables
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("vivace: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "loading" not in done.stderr.replace("before it is loaded", "")
    return done.returncode, errors[0]


def test_a_port_in_use_is_an_error_before_a_recipe_is_searched_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        began = time.monotonic()
        status, error = error_of("tiny-sd", "--tune", "60", "--port", port)
    assert status == 2
    assert f"--port {port}: Address already in use; give another, or --port 0 for a free one" in error
    assert time.monotonic() - began < 60


def test_a_gated_model_says_where_to_ask_for_access(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with serve_hub() as hub:
        hub.repositories["org/gated"] = Repository({"main": tmp_path}, refuse=(401, "GatedRepo"))
        variables = client_of(hub, tmp_path / "home", HF_HUB_OFFLINE="0")
        status, error = error_of("org/gated", "--recipe", "baseline", "--port", "0", **variables)
    assert status == 3
    assert "org/gated is gated: ask for access at " in error
    assert "then log in with `hf auth login` or set HF_TOKEN" in error


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("tiny-sd", "--recipe", "nonsense"), 2, "no technique 'nonsense'"),
        (("tiny-sdd", "--recipe", "baseline"), 2, "no model 'tiny-sdd'"),
        (("tiny-sd", "--recipe", "baseline", "--gpus", "all"), 3, "leave out --gpus"),
    ],
)
@pytest.mark.quick("arguments1*")
def test_what_is_not_there_is_said_at_once(arguments: tuple[str, ...], status: int, message: str) -> None:
    got, error = error_of(*arguments, "--port", "0", CUDA_VISIBLE_DEVICES="")
    assert (got, message in error) == (status, True), error


def test_missing_packages_are_named_as_pip_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("uvicorn", "python_multipart") else 1
    )
    with pytest.raises(Unsupported, match="pip install uvicorn python-multipart"):
        _check_installed()


def test_a_folder_of_loras_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"there is no \.safetensors file in it"):
        folder_of_loras(tmp_path)
    (tmp_path / "a.safetensors").touch()
    (tmp_path / ".safetensors").touch()
    assert folder_of_loras(tmp_path) == tmp_path
    assert list(lora_files(tmp_path)) == ["a"]
    os.close(os.open(os.fsencode(tmp_path) + b"/bad\xff.safetensors", os.O_CREAT))
    with pytest.raises(UsageError, match=r"no request can name 'bad\\udcff'; rename it"):
        folder_of_loras(tmp_path)

    def forbidden(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        folder_of_loras(tmp_path)
