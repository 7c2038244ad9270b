"""What a search lacks is said before anything else, all of it at once and without waiting for a network."""

import dataclasses
import time
from pathlib import Path

import pytest

from tests.typed import said
from vivace.errors import Unsupported
from vivace.tuning import surroundings
from vivace.tuning.asked import Asked
from vivace.tuning.readiness import check_ready
from vivace.tuning.surroundings import Surroundings, can_connect

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


def lacks(model: str, here: Surroundings = LAPTOP, device: str = "auto", **asked: int) -> list[str]:
    """Return the kinds of what is missing: "GPU", "memory", "download", ...; fails if nothing ends the search."""
    with pytest.raises(Unsupported) as caught:
        check_ready(model, device, 8.0, Asked(**asked), here=here)  # type: ignore[arg-type]
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    return [line.removeprefix("  - ").partition(":")[0] for line in lines]


def test_a_laptop_is_told_everything_that_a_large_model_needs() -> None:
    assert lacks("flux-dev") == ["GPU", "memory", "download", "access"]
    assert lacks("synthetic:flux-dev") == ["GPU", "memory"]
    assert lacks("flux-schnell", device="cpu") == ["GPU", "memory", "download", "access"]
    assert lacks("sdxl") == ["GPU", "download"]
    assert lacks("flux-dev", device="cuda")[0] == "GPU"
    assert lacks("nobody/has-this") == ["download"]


def test_a_gpu_may_be_too_small_for_the_baseline() -> None:
    assert lacks("synthetic:flux-dev", WORKSTATION) == ["memory"]
    assert check_ready("synthetic:sdxl", "auto", 8.0, Asked(), here=WORKSTATION) == []
    unknown = dataclasses.replace(WORKSTATION, gpu_bytes=None)
    assert check_ready("synthetic:flux-dev", "auto", 8.0, Asked(), here=unknown) == []


def test_what_can_succeed_is_not_refused() -> None:
    assert check_ready("tiny-sd", "auto", 8.0, Asked(), here=LAPTOP) == []
    assert check_ready("tiny-flux", "cpu", 8.0, Asked(), here=LAPTOP) == []
    small = Asked(height=64, width=64, num_inference_steps=2)
    (note,) = check_ready("synthetic:sd15", "auto", 8.0, small, here=LAPTOP)
    assert note.startswith("GPU: no GPU was found on this machine; an image takes at least")
    assert check_ready("synthetic:sd15", "cpu", None, Asked(), here=LAPTOP) == []
    (note,) = check_ready("synthetic:sd15", "auto", None, Asked(), here=LAPTOP)
    assert "too long" not in note
    other_maker = dataclasses.replace(LAPTOP, may_have_gpu=True)
    assert check_ready("synthetic:flux-dev", "auto", 8.0, Asked(), here=other_maker) == []


def test_a_judge_that_is_not_here_is_missing_too() -> None:
    with pytest.raises(Unsupported, match="--scorer nobody/clip is not on this machine, and HF_HUB_OFFLINE"):
        check_ready("tiny-sd", "cpu", 8.0, Asked(), scorer="nobody/clip", here=LAPTOP)


def test_an_unreachable_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        time.sleep(3)
        raise OSError

    monkeypatch.setattr(surroundings.socket, "create_connection", slow)
    began = time.monotonic()
    assert not can_connect("https://hub.invalid", patience_s=0.2)
    assert time.monotonic() - began < 2


def test_pytorch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "this_gpu", lambda: "NVIDIA H100")
    monkeypatch.setattr(surroundings, "_torch_build", lambda: "cpu")
    here = surroundings.surroundings()
    assert here.gpu is None
    assert here.why_no_gpu.startswith("PyTorch is installed without support for the NVIDIA H100")


def test_the_command_says_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.tuning.readiness.surroundings", lambda: LAPTOP)
    message = said(tmp_path, "tune", "flux-dev", "--device", "cuda", code=3).stderr
    assert "flux-dev cannot be tuned here:" in message
    assert message.index("GPU:") < message.index("download:") < message.index("access:")
    assert "`vivace tune tiny-flux` runs on any machine" in message
    assert not (tmp_path / ".vivace").exists()
