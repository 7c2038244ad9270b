"""Ctrl-C while a command imports its libraries ends it with exit code 130, and without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.foundation.processes.system import is_posix

pytestmark = pytest.mark.skipif(not is_posix(), reason="signals of POSIX")
INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
"""Python runs it when it starts: it sends the signal when a module is about to be imported."""


@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("vivace.cli", ["models"]),
        ("click", ["--help"]),
        ("vivace.cli.measuring.tune", ["tune", "tiny-sd"]),
        ("torch", ["generate", "a red circle", "--model", "tiny-sd"]),
    ],
)
def test_an_early_interrupt_is_quiet(
    is_script: bool, module: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(module=module))
    script = tmp_path / "vivace"
    script.write_text("import sys\nfrom vivace.cli import main\nsys.exit(main())\n")
    done = subprocess.run(
        [sys.executable, *([str(script)] if is_script else ["-m", "vivace"]), *arguments],
        cwd=tmp_path / ".." if is_script else tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() in ("", "vivace: interrupted")
    assert not done.stdout


def test_another_program_keeps_its_handler() -> None:
    code = "import signal, vivace; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout.strip() == "True", done.stderr
