"""A contribution has the samples of a store and nothing personal, and what is none is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.community_tables import tables_of
from tests.make import make_environment, make_round, make_trial
from tests.typed import typed
from vivace.benchmark.store import Store
from vivace.benchmark.store.contributing import contribution_of
from vivace.errors import StoreError
from vivace.evidence.lint.check import checked
from vivace.evidence.lint.read_tables import read_contribution, read_tables
from vivace.foundation.spec.environment import Place
from vivace.foundation.spec.record import Round
from vivace.foundation.spec.trial import Model
from vivace.foundation.stats import Gate

SECRET = "a portrait of Ada"


def store(folder: Path, *recipes: str, model: Model | None = None) -> Path:
    place = Place(uuid="GPU-5f0c", host="ada-laptop")
    environment = make_environment().model_copy(
        update={"variables": {"CUDA_PATH": "/home/ada"}, "place": place}
    )
    trials = [make_trial(recipe, prompts=(SECRET, "a star")) for recipe in recipes]
    if model is not None:
        trials = [trial.model_copy(update={"model": model}) for trial in trials]
    with Store.create(folder) as opened:
        keys = opened.start_run("vivace bench", trials, environment, rounds=1).keys
        for number, key in enumerate(keys):
            opened.append(
                key, personal(make_round(0, times=(1.0 / (number + 1),) * 5, prompts=(SECRET, "a star")))
            )
    return folder


def personal(round_: Round) -> Round:
    """A round with everything that can be personal."""
    return round_.model_copy(
        update={
            "effects": {"lora": {"lora": "/home/ada/style.safetensors"}},
            "evidence": {"file": "/home/ada"},
            "warnings": ("/home/ada is slow",),
            "conditions": {"python_ms": 1.0, "gpu": "/dev/ada"},
        }
    )


def written(content: Any, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_samples_and_nothing_personal(tmp_path: Path) -> None:
    contribution, left_out = contribution_of(
        [store(tmp_path / "store", "baseline", "bf16", "quantize(int8)")]
    )
    text = contribution.model_dump_json()
    assert "ada" not in text.lower()
    assert left_out == []
    rows = contribution.comparisons[0].rows
    assert [row.record.trial.recipe.text for row in rows] == ["baseline", "dtype(bf16)", "quantize(int8)"]
    assert [sample.total_s for sample in rows[1].record.rounds[0].samples] == [0.5] * 5
    assert rows[0].record.environment.device_name == "Test CPU"
    assert rows[2].weights == {"denoiser": "in int8, a scale per output row"}
    assert read_contribution(json.loads(text)) == contribution


def test_rows_that_are_personal_are_left_out(tmp_path: Path) -> None:
    recipes = ["baseline", "bf16", "lora('/home/ada/style.safetensors', sha256=0123456789abcdef)"]
    contribution, left_out = contribution_of([store(tmp_path / "store", *recipes)])
    assert len(contribution.comparisons[0].rows) == 2
    assert len(left_out) == 1
    assert left_out[0].endswith("path of lora names a file")
    own = Model(name="/home/ada/model", source="folder", revision="0" * 16)
    with pytest.raises(StoreError, match="its model is a folder or a file of this machine"):
        contribution_of([store(tmp_path / "own", "baseline", model=own)])
    with pytest.raises(StoreError, match="no store at"):
        contribution_of([tmp_path / "none"])


def test_lint_reads_it(tmp_path: Path) -> None:
    contribution, _ = contribution_of([store(tmp_path / "store", "baseline", "bf16")])
    path = written(contribution.model_dump(mode="json"), tmp_path / "card.json")
    (table,) = read_tables(path)
    done = checked(table, {})
    assert len(table.rows) == 2
    assert not [finding for finding in done.findings if finding.severity == "impossible"]


def test_tables_say_that_others_reported_them(tmp_path: Path) -> None:
    contribution, _ = contribution_of([store(tmp_path / "store", "baseline", "bf16")])
    content = contribution.model_dump(mode="json")
    content["comparisons"][0]["rows"][1]["closeness"] = {
        "gate": "passed",
        "num_prompts": 12,
        "ssim": [0.9, 0.8, 1.0],
    }
    (table,) = tables_of(read_contribution(content), "card.json")
    assert (table.kind, table.place, table.model, table.gpu) == (
        "community",
        "card.json",
        "tiny-sd",
        "Test CPU",
    )
    quality = table.rows[1].judged
    assert quality is not None
    assert quality.gate is Gate.PASSED
    assert table.rows[1].latency is not None
    assert table.rows[1].latency.point == pytest.approx(0.5)


def test_contribute_writes_and_checks_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, path = store(tmp_path / "store", "baseline", "bf16"), tmp_path / "card.json"
    assert typed(monkeypatch, "contribute", str(folder), "-o", str(path)) == 2
    assert "give --sign-off to state: I measured these rows myself" in capfd.readouterr().err
    assert not path.exists()
    assert typed(monkeypatch, "contribute", str(folder), "--sign-off", "-o", str(path)) == 0
    assert "2 rows of 1 comparisons" in capfd.readouterr().out
    assert typed(monkeypatch, "lint", str(path)) == 0
