"""Malformed and malicious input on the command line: one message, no traceback, nothing executed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from tests.typed import typed
from vivace.cli import app
from vivace.cli.watched import guarded
from vivace.errors import UnusableModel
from vivace.models.find import WEIGHTS, find_model
from vivace.models.reading_limits import ReadingLimits

BENCH = ("bench", "--recipe", "baseline")


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.txt")
    Path("zero.txt").symlink_to("/dev/zero")
    Path("many.txt").write_text("x\n" * 1_000_000)
    Path("long.txt").write_text("x" * 30_000)
    Path("surrogate.txt").write_bytes("\ud800".encode(errors="surrogatepass"))


def _copy(name: str) -> Path:
    return Path(shutil.copytree(WEIGHTS / "tiny-sd", name))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((*BENCH, "--prompts", "pipe.txt"), 2, "it is a named pipe"),
        ((*BENCH, "--prompts", "zero.txt"), 2, "it is a device"),
        ((*BENCH, "--prompts", "many.txt"), 2, "1,000,000 prompts; give at most 10,000"),
        ((*BENCH, "--prompts", "long.txt"), 2, "must have at most 20,000 characters"),
        ((*BENCH, "--prompts", "surrogate.txt"), 2, "not UTF-8"),
        (("generate", "x\udc80"), 2, r"'x\udc80' is not UTF-8 text"),
        (("generate", "x", "--model", "m\udc80"), 2, "is not UTF-8 text"),
        (("plan", "~nobody-here/x"), 2, "no model '~nobody-here/x'"),
        (("generate", "x", "--model", "~nobody-here/x"), 2, "no model '~nobody-here/x'"),
        ((*BENCH, "--timeout", "inf"), 2, "--timeout"),
        ((*BENCH, "--timeout", "nan"), 2, "--timeout"),
        ((*BENCH, "--timeout", "1e300"), 2, "1e+300 is not in the range"),
        ((*BENCH, "--height", "9" * 400), 2, "--height"),
        (("generate", "x", "--seed", "9" * 30), 2, "--seed"),
        (("plan", "tiny-sd", "--card", "1e300"), 2, "--card"),
        ((*BENCH, "--min-quality", "clip=-1"), 2, "clip=-1.0 must be more than 0"),
        ((*BENCH, "--seed", "9223372036854775807", "--seeds", "2"), 2, "outside 0"),
        (("plan", "tiny-sd", "--recipe", "steps 20"), 2, "did you mean 'steps(20)'?"),
        (("plan", "tiny-sd", "--recipe", f"steps({'9' * 4000})"), 2, "steps must be a whole number"),
        (("generate", "x", "--out", "/proc/x"), 3, "/proc/x cannot be written"),
        (("export", "-o", "/proc/x/y.py"), 3, "/proc/x/y.py cannot be written"),
        (("report", "-o", "/proc/x/page.html"), 3, "/proc/x/page.html cannot be written"),
        (("demo", "-o", "/proc/x/page.html"), 3, "/proc/x/page.html cannot be written"),
        (("demo", "--store", "/proc/x"), 3, "/proc/x cannot be written"),
        (("plan", "\x1b]0;owned\x07"), 2, r"no model '\x1b]0;owned\x07'"),
        (("\x1b[2J",), 2, r"No such command '\x1b[2J'"),
    ],
    ids=lambda value: (
        " ".join(value)[:50].encode("ascii", "replace").decode() if isinstance(value, tuple) else ""
    ),
)
def test_hostile_input_is_one_clear_message(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, *arguments) == code
    out, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert not {"\x1b", "\x07"} & set(err)
    assert out == ""


def test_nothing_is_drawn_for_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["vivace.cli.generate"], "_draw", lambda *_: pytest.fail("it drew"))
    assert typed(monkeypatch, "generate", "x", "--out", "/proc/x") == 3
    assert "/proc/x cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_the_test_of_a_folder_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, code: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["vivace.cli.generate"], "_draw", lambda *_: code)
    assert typed(monkeypatch, "generate", "x", "--out", "a/b") == code
    assert not (tmp_path / "a").exists()


def _no_option_is_unbounded(command: click.Command) -> list[str]:
    context = click.Context(command)
    group = command if isinstance(command, click.Group) else None
    names = () if group is None else group.list_commands(context)
    commands = [found for name in names if (found := group and group.get_command(context, name)) is not None]
    unbounded = [name for subcommand in commands for name in _no_option_is_unbounded(subcommand)]
    for option in command.params:
        kind = option.type
        if isinstance(kind, click.IntRange | click.FloatRange):
            is_bounded = kind.min is not None and kind.max is not None
        else:
            is_bounded = kind not in (click.INT, click.FLOAT)
        if not is_bounded:
            unbounded.append(f"{command.name} {option.name}")
    return unbounded


def test_every_number_has_a_range() -> None:
    assert _no_option_is_unbounded(app) == []


@pytest.mark.timeout(60)
def test_pictures_that_are_none(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Image.new("L", (16, 16), 99).save(f"{folder}/\x1b[2J.png")
    assert typed(monkeypatch, "quality", "a", "b") == 0
    assert "\x1b" not in capfd.readouterr().out
    os.mkfifo("a/x.png")
    os.mkfifo("b/x.png")
    assert typed(monkeypatch, "quality", "a", "b") == 2
    assert "a/x.png cannot be read as an image: it is a named pipe" in capfd.readouterr().err


@pytest.mark.long
def test_a_first_call_that_fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The scheduler loads, and fails when it is used; the traceback is there for those who ask."""
    folder = _copy("model")
    edit(folder / "scheduler" / "scheduler_config.json", timestep_spacing="backwards")
    arguments = ("generate", "x", "--model", "model", "--num-inference-steps", "1", "--threads", "1")
    assert typed(monkeypatch, *arguments) == 3
    err = capfd.readouterr().err
    assert "does not run as a StableDiffusionPipeline" in err
    assert "Traceback" not in err
    assert typed(monkeypatch, *arguments, "--debug") == 3
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ("time.sleep(60)", "took more than 1 s to read"),
        ("os.abort()", "ended the process that used it (SIGABRT)"),
        ("held = os.urandom(1) * 10**9; time.sleep(60)", "GB of memory to read"),
    ],
    ids=["hangs", "aborts", "allocates"],
)
def test_reading_a_hostile_model_has_limits(work: str, says: str, tmp_path: Path) -> None:
    limits = ReadingLimits(seconds=1.0 if "1 s" in says else 20.0, num_bytes=3e8)
    with pytest.raises(UnusableModel, match=re.escape(says)):
        guarded.watch(_started(work), tmp_path / "read", "model", limits)


def test_no_limits_once_the_model_is_read(tmp_path: Path) -> None:
    is_read = tmp_path / "read"
    work = f"open({str(is_read)!r}, 'w').close(); time.sleep(1.5); sys.exit(4)"
    assert guarded.watch(_started(work), is_read, "model", ReadingLimits(1.0, 1e12)) == 4


def _started(work: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os, sys, time; {work}"], start_new_session=True)


def test_models_of_the_catalogue_need_no_child() -> None:
    pid = os.getpid()
    assert guarded.guarded(find_model("tiny-sd"), lambda is_read: os.getpid()) == pid
