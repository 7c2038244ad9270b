"""A recipe compared with itself: what is counted, and that the command goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against_itself
from benchmarks.command import run
from vivace.benchmark.studies import start_launcher
from vivace.foundation.stats import Verdict


def test_it_counts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = iter(["unclear", "faster", "same", "slower", "unclear", "unclear"])

    def compare(_: Any) -> dict[str, Any]:
        return {"verdict": next(verdicts)}

    monkeypatch.setattr(against_itself, "compare", compare)
    path = tmp_path / "record.json"
    assert run(against_itself.command, ["--number", "2", "--quiet", "--record", str(path)]) == 0
    assert "with no core kept busy: 1 of 2 called" in capsys.readouterr().out
    for _ in range(2):
        assert run(against_itself.command, ["--number", "3", "--record", str(path)]) == 0
        assert "with one core kept busy: 1 of 3 called" in capsys.readouterr().out
    cases = json.loads(path.read_text())
    assert [case["busy"] for case in cases] == [False] * 2 + [True] * 3
    assert all(case["load"] >= 0 and case["cores"] >= 1 for case in cases)


def test_the_committed_record_has_at_most_one_false_verdict() -> None:
    cases = json.loads(against_itself.RESULTS.read_text())
    busy = [case for case in cases if case["busy"]]
    assert len(busy) >= against_itself.NUMBER
    assert sum(case["verdict"] in (Verdict.FASTER, Verdict.SLOWER) for case in busy) <= 1


@pytest.mark.soak
def test_a_real_comparison() -> None:
    with start_launcher("cpu") as launcher:
        case = against_itself.compare(launcher)
    assert case["low"] < case["ratio"] < case["high"]
    assert case["verdict"] in set(Verdict)
    assert len(case["cpu_shares"]) == 2
