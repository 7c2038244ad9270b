"""`best` typed in a command: it says what it became, and what is kept holds the recipe itself."""

from pathlib import Path

import pytest
from PIL import Image

import vivace
from tests.typed import run_vivace, typed


@pytest.fixture(autouse=True)
def _no_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` leaves some in the folder where tests run."""
    monkeypatch.chdir(tmp_path)


def test_generate_says_what_it_became_and_writes_that_down(tmp_path: Path) -> None:
    options = ["--recipe", "best(changes=True)", "-o", "x.png", "--device", "cpu"]
    done = run_vivace(tmp_path, "generate", "a red circle", *options)
    assert "best is distilled(lcm): " in done.stderr
    assert Image.open(tmp_path / "x.png").text["recipe"] == "distilled(lcm)"  # type: ignore[attr-defined]


def test_several_models_have_each_another(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    models = ("--model", "tiny-sd", "--model", "tiny-flux")
    assert typed(monkeypatch, "bench", *models, "--recipe", "baseline", "--recipe", "best") == 2
    assert "best depends on the model, and 2 are given" in capfd.readouterr().err


def test_load_takes_the_word_and_warns_what_it_is() -> None:
    session = vivace.load("tiny-sd", "best+steps(3)", device="cpu")
    assert session.recipe.text == "steps(3)"
    assert session.warnings[0].startswith("best is steps(3): ")
