"""Commands with VIVACE_NO_FORK=1: what a forked child would do, a fresh process does."""

import os
import shutil
import sys
from pathlib import Path

import pytest

import vivace
from tests.faulty_worker import COMMAND, Fault
from tests.typed import typed
from vivace.benchmark import Timing
from vivace.foundation.processes import launcher
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome
from vivace.models.find import WEIGHTS
from vivace.models.reading_limits import ReadingLimits
from vivace.techniques import TECHNIQUES


@pytest.fixture(autouse=True)
def _without_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVACE_NO_FORK", "1")
    for name in ("fork", "killpg", "setpgid"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(WEIGHTS / "tiny-sd", "model")


GENERATE = ("generate", "a red circle", "--recipe", "steps:1", "--threads", "1", "-o", "image.png")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_foreign_model_draws_the_same_image(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *GENERATE, "--model", "model") == 0
    printed = capfd.readouterr()
    assert printed.out == "image.png\n"
    assert printed.err.count("loading") == 1
    drawn = Path("image.png").read_bytes()
    assert typed(monkeypatch, *GENERATE) == 0
    assert _pixels(Path("image.png").read_bytes()) == _pixels(drawn)


def _pixels(image: bytes) -> bytes:
    import io

    from PIL import Image

    with Image.open(io.BytesIO(image)) as picture:
        return picture.tobytes()


def test_reading_without_fork_has_limits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ReadingLimits, "of", classmethod(lambda cls, _: cls(0.3, 1e12)))
    assert typed(monkeypatch, *GENERATE, "--model", "model") == 3
    assert "took more than 0 s to read" in capfd.readouterr().err
    assert not Path("image.png").exists()


def test_a_library_that_aborts_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = launcher.start_attached
    aborts = [sys.executable, "-c", "import os; os.abort()"]
    monkeypatch.setattr(launcher, "start_attached", lambda command, output: begin(aborts, output))
    assert typed(monkeypatch, *GENERATE, "--model", "model") == 3
    assert "ended the process that used it (SIGABRT)" in capfd.readouterr().err


def test_ctrl_c_is_no_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = launcher.start_attached
    interrupted = [
        sys.executable,
        "-c",
        "import signal; signal.signal(2, signal.SIG_DFL); signal.raise_signal(2)",
    ]
    monkeypatch.setattr(launcher, "start_attached", lambda command, output: begin(interrupted, output))
    assert typed(monkeypatch, *GENERATE, "--model", "model") == 130
    assert capfd.readouterr().err == "\nvivace: interrupted\n"


def test_an_error_before_the_model_is_read_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where only the fresh process meets it."""
    begin = launcher.start_attached

    def without_model(command: list[str], output: int) -> object:
        shutil.rmtree("model")
        return begin(command, output)

    monkeypatch.setattr(launcher, "start_attached", without_model)
    assert typed(monkeypatch, *GENERATE, "--model", "model") == 2
    assert capfd.readouterr().err.count("vivace: ") == 1


@pytest.mark.long
@pytest.mark.timeout(280)
def test_rounds_run_in_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TECHNIQUES, "fault", Fault)
    timing = Timing(rounds=1, repeats=1, max_warmup=1, timeout_s=60)
    with Launcher(COMMAND) as launcher:
        records = vivace.bench(
            "tiny-sd",
            ["fault(kill)", "baseline"],
            num_inference_steps=1,
            timing=timing,
            quality=False,
            plan=False,
            store=tmp_path / "store",
            launcher=launcher,
            device="cpu",
        )
        assert not launcher.forks
    killed, baseline = records
    assert baseline.outcome is Outcome.MEASURED
    assert killed.outcome is Outcome.CRASHED
    assert "SIGKILL" in (killed.reason or "")
