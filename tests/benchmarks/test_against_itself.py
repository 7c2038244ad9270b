"""A recipe compared with itself: what is counted, and that the command goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against_itself
from benchmarks.command import run
from vivace.benchmark.studies import start_launcher
from vivace.stats import Verdict


def test_it_counts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = iter(["unclear", "faster", "same", "slower", "unclear", "unclear"])

    def compare(_: Any) -> dict[str, Any]:
        return {"verdict": next(verdicts)}

    monkeypatch.setattr(against_itself, "compare", compare)
    path = tmp_path / "record.json"
    assert run(against_itself.command, ["--number", "2", "--record", str(path)]) == 0
    assert "quiet machine: 1 of 2 called" in capsys.readouterr().out
    assert run(against_itself.command, ["--number", "3", "--record", str(path)]) == 0
    assert "with one core kept busy: 1 of 3 called" in capsys.readouterr().out
    assert [case["busy"] for case in json.loads(path.read_text())].count(True) == 3


@pytest.mark.soak
def test_a_real_comparison() -> None:
    with start_launcher("cpu") as launcher:
        case = against_itself.compare(launcher)
    assert case["low"] < case["ratio"] < case["high"]
    assert case["verdict"] in set(Verdict)
    assert len(case["cpu_shares"]) == 2
