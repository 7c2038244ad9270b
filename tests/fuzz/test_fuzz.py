"""No malformed or malicious input ends in a traceback, runs code, hangs, or reaches the terminal."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz.cases import make
from tests.fuzz.runner import Run, run, warm

_SAMPLE = 12
_SOAK = int(os.environ.get("VIVACE_FUZZ_CASES", "2000"))


def tried(seed: int, folder: Path) -> tuple[list[str], Run]:
    """Make and run a case in a new folder, which is removed again."""
    folder.mkdir()
    arguments = make(seed, folder)
    try:
        return arguments, run(folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def complaints(seeds: range, folder: Path) -> list[str]:
    warm()
    lines = []
    for seed in seeds:
        arguments, outcome = tried(seed, folder / str(seed))
        if outcome.wrong:
            last = (outcome.output.strip().splitlines() or [""])[-3:]
            lines.append(f"{seed}: {' '.join(map(ascii, arguments))[:300]}: {outcome.wrong}: {last}")
            print(lines[-1], flush=True)
    return lines


def test_a_sample(tmp_path: Path) -> None:
    assert complaints(range(_SAMPLE), tmp_path) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many(tmp_path: Path) -> None:
    assert complaints(range(1000, 1000 + _SOAK), tmp_path) == []


def test_the_fuzzer_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of complaint, from a command that does what none may do."""

    def faults_of(code: str) -> tuple[str, ...]:
        monkeypatch.setattr("vivace.cli.main", lambda: exec(code, {}))  # noqa: S102
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return run(folder, []).wrong

    assert faults_of("raise SystemExit(3)") == ()
    assert faults_of("1 / 0") == ("ended with 99", "printed a traceback")
    assert faults_of("print('\\x1b[2J'); raise SystemExit(0)") == ("printed an escape sequence",)
    assert (
        "executed subprocess.Popen"
        in faults_of("import subprocess; subprocess.run(['true']); raise SystemExit(0)")[0]
    )
    assert faults_of("import os; os.abort()") == ("ended with -6",)
