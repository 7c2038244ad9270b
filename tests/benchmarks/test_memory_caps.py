"""What fits a card, proven under a cap: what is read of `vivace plan`, run, written and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import memory_caps as caps

ANSWER: dict[str, Any] = {
    "model": "sdxl",
    "card_gb": 8,
    "recipe": "offload(group)",
    "height": 64,
    "width": 64,
    "peak_bytes": 2_000_000_000,
    "loading_bytes": 1,
    "predicted_s": 9.0,
    "is_at_most": False,
    "predicted_from": "its operations",
    "times_of": "RTX 4060",
}


def facts(**changed: Any) -> dict[str, Any]:
    change = {"recipe": "offload(group)", "height": 8, "width": 8, "peak_bytes": 5, "loading_bytes": 1}
    ranked = {"recipe": "offload(group)", "latency_s": 9.0, "predicted_from": "H200"}
    return {
        "recipe": "baseline", "height": 8, "width": 8, "peak_bytes": 9, "loading_bytes": 9, "fits_card": False,
        "changes": [change | {"fills": False, "fits_card": True}], "ranking": [ranked], "times_of": "RTX 4060",
        "records_of": "study-000",
    } | changed  # fmt: skip


def test_the_answer_is_the_last_change_that_fits() -> None:
    answer = caps.answer_in(facts())
    assert (answer["recipe"], answer["peak_bytes"], answer["predicted_s"]) == ("offload(group)", 5, 9.0)
    assert (answer["predicted_from"], answer["times_of"], answer["is_at_most"]) == ("H200", "RTX 4060", False)
    first = facts()["changes"][0]
    second = first | {"recipe": "offload(group, keep=6)", "fills": True}
    answer = caps.answer_in(facts(changes=[first, second]))
    assert (answer["recipe"], answer["is_at_most"]) == ("offload(group, keep=6)", True)
    assert caps.answer_in(facts(changes=[], fits_card=True, ranking=[]))["recipe"] == "baseline"
    assert caps.answer_in(facts(changes=[first | {"fits_card": False}]))["recipe"] is None
    measured = facts()["ranking"][0] | {"predicted_from": None}
    assert caps.answer_in(facts(ranking=[measured]))["measured_in"] == "study-000"
    assert answer["measured_in"] is None


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([ANSWER, ANSWER | {"card_gb": 12}, ANSWER | {"card_gb": 16, "recipe": None}]))
    return path


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(caps.memory_caps, [*arguments], catch_exceptions=False)


def test_each_case_has_a_row_and_the_command_goes_on(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[int] = []

    def run_case(answer: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        cases.append(answer["card_gb"])
        ran = {"outcome": "ran", "image_s": 1.5, "load_s": 3.0, "reserved_bytes": 7e9, "cap_bytes": 7.4e9}
        return {key: answer[key] for key in ("model", "card_gb", "recipe")} | ran

    monkeypatch.setattr(caps, "run_case", run_case)
    record = tmp_path / "caps.jsonl"
    options = ("--answers", str(answers), "--record", str(record))
    stopped = invoked(*options, "--limit-s", "0")
    assert (stopped.exit_code, cases) == (0, []) or "goes on with sdxl in 8 GB" in stopped.stderr
    result = invoked(*options)
    assert cases == [8, 12]
    assert "sdxl in 8 GB, offload(group): ran, 1.50 s an image, 7.00 of 7.40 GB" in result.output
    assert [row["card_gb"] for row in caps.read_rows(record)] == [8, 12]
    invoked(*options)
    assert cases == [8, 12], "what has a row is not run again"


# The page


def test_the_record_has_every_model_and_card() -> None:
    rows = {(row["model"], row["card_gb"]): row for row in caps.read_answers(caps.PLAN)}
    assert rows.keys() == {(model, card) for model in caps.MODELS for card in caps.CARDS_GB}
    for (_, card), row in rows.items():
        assert max(row["peak_bytes"], row["loading_bytes"]) + 1e9 <= card * 1e9
        assert row["predicted_s"] > 0
        assert row["times_of"]
        assert row["predicted_from"] or row["measured_in"]
