"""The harness beside a plain script: both draw the same, each pair gives a ratio, cases are resumed."""

from pathlib import Path

import pytest

from benchmarks import overhead
from benchmarks.command import run
from benchmarks.overhead import line, ratios, read_cases
from benchmarks.overhead import overhead as command
from tests.narrow import SIDE, make_all_small

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--device", "cpu", "--pairs", "3", "--warmup", "1", "--backend", "eager"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_all_small(monkeypatch)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "overhead.jsonl"


@pytest.mark.soak
def test_every_case_is_a_line_of_pairs(
    record: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(command, ["--record", str(record), *QUICK]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [text.split(":")[0] for text in lines] == [
        f"{model} {mode}, 2 steps" for model in ("sd15", "sdxl", "flux-dev") for mode in ("eager", "compiled")
    ]
    assert all("over 3 pairs" in text for text in lines)
    cases = read_cases(record)
    assert len(cases) == 6
    for case in cases.values():
        assert len(case["plain_s"]) == len(case["vivace_s"]) == len(ratios(case)) == 3
        assert 0.2 < min(ratios(case)) <= max(ratios(case)) < 5, "the same work on either side"
        assert case["height"] == SIDE
        assert case["environment"]["device"] == "cpu"
        assert (case["backend"] == "eager") == (case["mode"] == "compiled")
    before = record.read_bytes()
    monkeypatch.setattr(overhead, "measure", lambda *_: pytest.fail("it is in the record"))
    assert run(command, ["--record", str(record), *QUICK]) == 0
    again = capfd.readouterr().out.splitlines()
    assert again == [f"{text} (in the record already)" for text in lines]
    assert record.read_bytes() == before


def test_the_ratio_is_the_pairs_own() -> None:
    case = {
        "model": "synthetic:sdxl",
        "mode": "eager",
        "num_inference_steps": 50,
        "plain_s": [1.0, 2.0, 4.0],
        "vivace_s": [1.1, 2.0, 3.6],
    }
    assert ratios(case) == pytest.approx([1.1, 1.0, 0.9])
    assert line(case).startswith("sdxl eager, 50 steps: plain 2.00 s, vivace 2.00 s, ratio 1.0000 [0.84")
