"""A LoRA beside the weights against none and a merged one: turns give ratios, exchanges are counted, cases resume."""

from pathlib import Path

import pytest

from benchmarks import lora
from benchmarks.command import run
from benchmarks.lora import SIDES, line, ratios, read_cases
from benchmarks.lora import lora as command

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--device", "cpu", "--turns", "2", "--swaps", "3", "--steps", "2", "--rank", "2", "--reserve", "4"]


def test_a_lora_case_is_a_line_and_is_measured_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "lora.jsonl"
    words = ["--record", str(record), *QUICK, "--recipe", "compile(backend=eager)"]
    assert run(command, words) == 0
    lines = capfd.readouterr().out.splitlines()
    (case,) = read_cases(record).values()
    assert lines == [line(case)]
    assert case["layers"] == 56
    assert {side: len(times) for side, times in case["step_s"].items()} == dict.fromkeys(SIDES, 2)
    assert all(0.1 < ratio < 10 for side in SIDES for ratio in ratios(case, side))
    assert len(case["exchange_s"]) == len(case["rescaling_s"]) == 3
    assert case["graphs_after"] == case["graphs_before"], "an exchange compiles nothing"
    assert case["graphs_before"]["compiled_graphs"] >= 2, "code without a LoRA is not used with one"
    monkeypatch.setattr(lora, "measure", lambda *_: pytest.fail("it is in the record"))
    assert run(command, words) == 0
    assert capfd.readouterr().out.splitlines() == [f"{line(case)} (in the record already)"]
