"""The gate's calibration, end to end on a few pictures."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tinyworld import calibrate_gate, clip, evaluate
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.spec.limits import Limits


def row(fall: float, gate: str) -> dict[str, Any]:
    return {"fall": fall, "gate": gate}


def test_what_counts_as_ruined_and_as_good() -> None:
    rows = [
        row(0.30, "failed"),
        row(0.10, "unclear"),
        row(0.05, "failed"),
        row(0.019, "passed"),
        row(-0.01, "unclear"),
        row(0.02, "passed"),
    ]
    assert calibrate_gate.tally(rows) == {
        "num_recipes": 6, "num_ruined": 2, "num_caught": 1, "num_good": 2, "num_passed": 1,
    }  # fmt: skip


@pytest.mark.parametrize("model", calibrate_gate.RECIPES)
def test_the_recipes_exist_and_differ(model: str) -> None:
    recipes = [resolve(text).text for text in calibrate_gate.RECIPES[model]]
    assert len(set(recipes)) == len(recipes)
    assert recipes[0] == "baseline"


def test_the_committed_gate_catches_the_ruined_and_passes_the_good() -> None:
    result = json.loads(calibrate_gate.RECORD.read_text())
    rows = result["rows"]
    assert {key: result[key] for key in calibrate_gate.tally(rows)} == calibrate_gate.tally(rows)
    assert result["num_caught"] >= 0.95 * result["num_ruined"]
    assert result["num_passed"] >= 0.95 * result["num_good"]
    for model in ("tiny-sd", "tiny-flux"):
        assert sum(row["model"] == model for row in rows) >= 40
    assert {row["captions"] for row in rows} == {500}
    assert Limits().for_scorer(result["scorer"]).model_dump(mode="json") == result["limits"], (
        "the product's own"
    )
    page = calibrate_gate.PAGE.read_text()
    assert calibrate_gate.filled(page, result) == page, "run python -m tinyworld.calibrate_gate table"


def test_there_are_recipes_enough_of_both_families() -> None:
    assert len(calibrate_gate.RECIPES["tiny-sd"]) >= 40
    assert len(calibrate_gate.RECIPES["tiny-flux"]) >= 40


@pytest.mark.long
def test_drawing_and_judging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        PROMPT_SETS, "tinyworld", ("a red circle above a blue square", "a green star on a white background")
    )
    clip.save(tmp_path / "clip", clip.build())
    out = tmp_path / "gate"
    ask = Namespace(
        model="tiny-sd", out=out, recipes=["tiny_vae", "steps(1)", "attention(cudnn)"], every=1, captions=3,
        device="cpu", workers=1,
    )  # fmt: skip
    calibrate_gate.draw_all(ask)
    drawn = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in drawn] == ["baseline", "tiny_vae", "steps(1)", "attention(cudnn)"]
    calibrate_gate.draw_all(ask)
    assert capsys.readouterr().out == "", "what is drawn is not drawn again"
    record = tmp_path / "record.json"
    judge = Namespace(out=out, scorer=str(tmp_path / "clip"), limits='{"ssim": 0.5}', record=record)
    calibrate_gate.judge_all(judge)
    found = json.loads(record.read_text())
    rows = {r["recipe"]: r for r in found["rows"]}
    assert set(rows) == {"tiny_vae", "steps(1)"}, "what cannot run here is left out"
    assert rows["steps(1)"]["accuracy"] < rows["tiny_vae"]["accuracy"]
    assert rows["tiny_vae"]["fidelity"]["num_pictures"] == 6
    assert rows["tiny_vae"]["fidelity"]["ssim"]["mean"] > 0.9 > rows["steps(1)"]["fidelity"]["ssim"]["mean"]
    assert found["limits"]["ssim"] == 0.5
    assert found["num_recipes"] == 2


def test_pictures_come_from_their_own_seeds_whatever_the_batch() -> None:
    import vivace

    session = vivace.load("tiny-sd", "steps(2)", device="cpu")
    prompts, seeds = evaluate.held_out_captions(3), [5, 6, 7]
    together = calibrate_gate.draw(session, prompts, seeds, batch=3)
    apart = calibrate_gate.draw(session, prompts, seeds, batch=1)
    assert abs(together.astype(int) - apart.astype(int)).max() <= 2
