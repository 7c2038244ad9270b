"""What a search lacks is said before anything else, all of it at once and without waiting for a network."""

import contextlib
import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.typed import run_vivace
from vivace.errors import Unsupported
from vivace.foundation.hardware import Present
from vivace.measure import surroundings
from vivace.measure.surroundings import Surroundings
from vivace.tuning.readiness import check_ready, check_runs_here
from vivace.tuning.settings import ImageRequest

LAPTOP = Surroundings(
    gpu=None,
    gpu_bytes=None,
    may_have_gpu=False,
    why_no_gpu="no GPU was found on this machine",
    memory_bytes=16e9,
    num_cores=4,
    hub="https://hub.invalid",
    hub_cache=Path("/nowhere"),
    is_offline=True,
    has_token=False,
)
WORKSTATION = dataclasses.replace(LAPTOP, gpu="NVIDIA GeForce RTX 4090", gpu_bytes=25.8e9, memory_bytes=64e9)


def lacks(model: str, here: Surroundings = LAPTOP, device: str = "auto", **limits: int) -> list[str]:
    """Return the kinds of what is missing: "GPU", "memory", "download", ...; fails if nothing ends the search."""
    with pytest.raises(Unsupported) as caught:
        check_ready(model, device, 8.0, ImageRequest(**limits), here=here)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    return [line.removeprefix("  - ").partition(":")[0] for line in lines]


def test_a_laptop_is_told_everything_that_a_large_model_needs() -> None:
    assert lacks("flux-dev") == ["GPU", "memory", "download", "access"]
    assert lacks("synthetic:flux-dev") == ["GPU", "memory"]
    assert lacks("flux-schnell", device="cpu") == ["GPU", "memory", "download", "access"]
    assert lacks("sdxl") == ["GPU", "download"]
    assert lacks("flux-dev", device="cuda")[0] == "GPU"
    assert lacks("nobody/has-this") == ["download"]


def test_every_command_that_loads_says_at_once_that_it_cannot() -> None:
    for model, device, words in (
        ("flux-dev", "auto", ("memory: the model takes at least 67", "download: ", "access: ")),
        ("tiny-sd", "mps", ("--device mps",)),
        ("sdxl", "auto", ("download: ",)),
        ("nobody/has-this", "cpu", ("download: nobody/has-this is not on this machine, and HF_HUB_OFFLINE",)),
    ):
        with pytest.raises(Unsupported) as caught:
            check_runs_here(model, device, LAPTOP)
        assert all(each in str(caught.value) for each in words)
    for model in ("tiny-sd", "no-such-model", None):
        check_runs_here(model, "auto", LAPTOP)
    with pytest.raises(Unsupported) as caught:
        check_runs_here("flux-dev", "auto", WORKSTATION)
    assert "memory: " not in str(caught.value), "a recipe may make it smaller than its baseline"


@pytest.mark.parametrize(
    "command",
    [
        "generate x --model flux-dev",
        "save flux-dev DIR --recipe bf16",
        "serve flux-dev",
    ],
)
def test_commands_ask_before_the_network(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> Path:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("vivace.tuning.readiness.surroundings", lambda: LAPTOP)
    monkeypatch.setattr("vivace.models.hub.fetch", fetch)
    done = run_vivace(tmp_path, *command.split(), code=3)
    assert "flux-dev cannot be loaded here" in done.stderr
    assert "memory: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["generate x", "serve tiny-sd", "tune", "prove tiny-sd tiny-sd"])
def test_a_device_that_is_not_here_is_refused_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vivace.tuning.readiness.surroundings", lambda: LAPTOP)
    done = run_vivace(tmp_path, *command.split(), "--device", "cuda", code=3)
    assert "no GPU was found" in done.stderr


def test_a_gpu_may_be_too_small_for_the_baseline() -> None:
    assert lacks("synthetic:flux-dev", WORKSTATION) == ["memory"]
    assert messages_of("synthetic:sdxl", WORKSTATION) == []
    unknown = dataclasses.replace(WORKSTATION, gpu_bytes=None)
    assert messages_of("synthetic:flux-dev", unknown) == []


def messages_of(model: str, here: Surroundings, device: str = "auto", **fields: Any) -> list[str]:
    """Return what a search that goes on is told."""
    messages: list[str] = []
    values: dict[str, Any] = {"minutes": 8.0, "request": ImageRequest(), **fields}
    check_ready(model, device, here=here, tell=messages.append, **values)
    return messages


def test_what_can_succeed_is_not_refused() -> None:
    assert messages_of("tiny-sd", LAPTOP) == []
    assert messages_of("tiny-flux", LAPTOP, "cpu") == []
    small = ImageRequest(height=64, width=64, num_inference_steps=2)
    (note,) = messages_of("synthetic:sd15", LAPTOP, request=small)
    assert note.startswith("GPU: no GPU was found on this machine; an image takes at least")
    assert messages_of("synthetic:sd15", LAPTOP, "cpu", minutes=None) == []
    (note,) = messages_of("synthetic:sd15", LAPTOP, minutes=None)
    assert "too long" not in note
    assert messages_of("synthetic:flux-dev", dataclasses.replace(LAPTOP, may_have_gpu=True)) == []


def test_a_judge_that_is_not_here_is_missing_too() -> None:
    with pytest.raises(Unsupported, match="--scorer nobody/clip is not on this machine, and HF_HUB_OFFLINE"):
        check_ready("tiny-sd", "cpu", 8.0, ImageRequest(), scorer="nobody/clip", here=LAPTOP)


ONLINE = dataclasses.replace(WORKSTATION, is_offline=False, has_token=True)


@pytest.mark.parametrize(
    ("seconds", "is_reached", "ends", "says"),
    [
        (0.0, False, True, "cannot be reached"),
        (0.3, True, False, "does not answer"),
        (0.0, True, False, "is downloaded first"),
        (5.0, False, True, "does not answer"),
    ],
)
def test_a_hub_is_not_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_reached: bool, ends: bool, says: str
) -> None:
    """A slow network is told of at once, and given up only later."""

    def connect(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        time.sleep(seconds)
        if not is_reached:
            raise OSError
        return contextlib.nullcontext()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(surroundings, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(surroundings, "_LATE_S", 1.0)
    here, messages = dataclasses.replace(ONLINE), []
    with pytest.raises(Unsupported, match=says) if ends else contextlib.nullcontext():
        check_ready("sdxl", "auto", 8.0, ImageRequest(), here=here, tell=messages.append)
    assert len(messages) == (0 if says == "cannot be reached" else 1)
    assert all(says in message for message in messages)


def test_pytorch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "present_gpu", lambda: Present("NVIDIA H100", 80, 80))
    monkeypatch.setattr(surroundings, "_torch_build", lambda: "cpu")
    here = surroundings.surroundings()
    assert here.gpu is None
    assert here.why_no_gpu.startswith("PyTorch is installed without support for the NVIDIA H100")


def test_the_command_says_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.tuning.readiness.surroundings", lambda: LAPTOP)
    message = run_vivace(tmp_path, "tune", "flux-dev", "--device", "cuda", code=3).stderr
    assert "flux-dev cannot be tuned here:" in message
    assert message.index("GPU:") < message.index("download:") < message.index("access:")
    assert "`vivace tune tiny-flux` runs on any machine" in message
    assert not (tmp_path / ".vivace").exists()
