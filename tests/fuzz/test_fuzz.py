"""No malformed or malicious input ends in a traceback, runs code, hangs, or reaches the terminal."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz.cases import make
from tests.fuzz.runner import Seen, run, warm

_SAMPLE = 12
_SOAK = int(os.environ.get("VIVACE_FUZZ_CASES", "2000"))


def tried(seed: int, folder: Path) -> tuple[list[str], Seen]:
    """Make and run a case in a new folder, which is removed again."""
    folder.mkdir()
    arguments = make(seed, folder)
    try:
        return arguments, run(folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def complaints(seeds: range, folder: Path) -> list[str]:
    warm()
    found = []
    for seed in seeds:
        arguments, seen = tried(seed, folder / str(seed))
        if seen.wrong:
            last = (seen.said.strip().splitlines() or [""])[-3:]
            found.append(f"{seed}: {' '.join(map(ascii, arguments))[:300]}: {seen.wrong}: {last}")
            print(found[-1], flush=True)
    return found


def test_a_sample(tmp_path: Path) -> None:
    assert complaints(range(_SAMPLE), tmp_path) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many(tmp_path: Path) -> None:
    assert complaints(range(1000, 1000 + _SOAK), tmp_path) == []


def test_the_fuzzer_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of complaint, from a command that does what none may do."""

    def seen(code: str) -> tuple[str, ...]:
        monkeypatch.setattr("vivace.cli.main", lambda: exec(code, {}))  # noqa: S102
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return run(folder, []).wrong

    assert seen("raise SystemExit(3)") == ()
    assert seen("1 / 0") == ("ended with 99", "printed a traceback")
    assert seen("print('\\x1b[2J'); raise SystemExit(0)") == ("printed an escape sequence",)
    assert (
        "executed subprocess.Popen"
        in seen("import subprocess; subprocess.run(['true']); raise SystemExit(0)")[0]
    )
    assert seen("import os; os.abort()") == ("ended with -6",)
