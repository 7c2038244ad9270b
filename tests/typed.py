"""Run the command line in this process, because a new one takes seconds to import."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vivace.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `vivace ARGUMENTS` and return the exit code."""
    monkeypatch.setattr(sys, "argv", ["vivace", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def run_vivace(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `vivace ARGUMENTS` in a folder and return its standard output and standard error.

    Args:
        code: the expected exit code.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _restored_libraries(),
    ):
        # A child's output would not reach these streams.
        monkeypatch.setattr(
            "vivace.cli.watched.guarded.guarded_reading", lambda name, limits, command: command(lambda: None)
        )
        status = typed(monkeypatch, *arguments)
    output = [stream.buffer.getvalue().decode() for stream in (_flushed(out), _flushed(err))]  # type: ignore[attr-defined]
    assert status == code, output[1]
    assert "Traceback" not in output[1]
    return subprocess.CompletedProcess(["vivace", *arguments], status, *output)


def _flushed(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    return stream


@contextlib.contextmanager
def _restored_libraries():
    """Restore diffusers' verbosity and the number of threads, which commands change for their whole process."""
    import torch
    from diffusers.utils import logging

    before = logging.get_verbosity(), torch.get_num_threads()
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        torch.set_num_threads(before[1])
