"""Standard output carries what a command answers, and nothing that a library prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOISY = """
import ctypes, logging, subprocess, sys, threading
import click

def noise():
    print("python")
    sys.stdout.write("written\\n")
    click.echo("library's click")
    logging.getLogger("noisy").warning("logged")
    threading.Thread(target=print, args=("thread",)).start()
    subprocess.run([sys.executable, "-c", "print('child')"])
    subprocess.run([sys.executable, "-c", "print('given')"], stdout=sys.stdout)
    sys.__stdout__.write("original\\n")
    sys.__stdout__.flush()
    libc = ctypes.CDLL(None)
    libc.puts(b"libc")
    libc.fflush(None)
"""
RUN = """
import logging, sys, noisy
from vivace.evidence.lint import read_tables

logging.basicConfig(stream=sys.stdout)
read = read_tables.read_tables
read_tables.read_tables = lambda file: (noisy.noise(), read(file))[1]
from vivace.cli import main
main()
"""
NOISES = {"python", "written", "library's click", "thread", "child", "given", "original", "libc"}


@pytest.fixture
def noisy(tmp_path: Path) -> list[str]:
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "table.csv").write_text("recipe,mean_s,min_s\nslow,2.05,2.09\n")
    return [sys.executable, str(tmp_path / "run.py"), "lint", str(tmp_path / "table.csv"), "--format", "json"]


def test_what_libraries_and_children_print_goes_to_standard_error(noisy: list[str]) -> None:
    done = subprocess.run(noisy, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [finding["rule"] for finding in json.loads(done.stdout)] == ["mean-in-range"]
    assert set(done.stderr.splitlines()) >= NOISES
    assert "Traceback" not in done.stderr


def test_help_and_version_are_answers(noisy: list[str]) -> None:
    for argument, text in (("--version", "vivace, version"), ("--help", "Usage: vivace")):
        done = subprocess.run([*noisy[:2], argument], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(text)
        assert not done.stderr


def test_a_reader_that_goes_away_ends_the_command_in_silence(noisy: list[str]) -> None:
    with subprocess.Popen(noisy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        lines = process.stderr.read().splitlines()
        assert process.wait() in (0, 1)
    answers = {line for line in lines if "table.csv:2: read recipe (label)" in line}
    assert len(answers) == 1
    assert set(lines) - NOISES - answers <= {"WARNING:noisy:logged"}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_does_not_matter(stream: str, noisy: list[str]) -> None:
    number = {"stdout": 1, "stderr": 2}[stream]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {number}>&-', "sh", sys.executable, *noisy[1:2], "models", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
