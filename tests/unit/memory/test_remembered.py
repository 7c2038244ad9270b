"""Predictions that were made before."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vivace.errors import NoEffect, Unsupported, WorkloadError
from vivace.models.find import WEIGHTS
from vivace.recipes.resolve import resolve
from vivace.runtime.memory import remembered
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.weightless import find_weightless

PREDICTION = Prediction(
    model="m",
    recipe="baseline",
    height=128,
    width=128,
    batch=1,
    text="prompts",
    components=(),
    model_bytes=1,
    peak_bytes=2,
    peak_stage="vae",
    stages={},
    loading_bytes=1,
)


class Predictor:
    """Stands for `predict`: counts what it is asked, and answers or raises."""

    def __init__(self, answer: Prediction | Exception = PREDICTION) -> None:
        self.answer = answer
        self.requests: list[str] = []

    def __call__(self, model: Any, recipe: Any, **request: Any) -> Prediction:
        self.requests.append(f"{model.name} {recipe.text} {request}")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def predictor(monkeypatch: pytest.MonkeyPatch, answer: Prediction | Exception = PREDICTION) -> Predictor:
    made = Predictor(answer)
    monkeypatch.setattr(remembered, "predict", made)
    return made


def ask(model: str = "tiny-sd", recipe: str = "baseline", **request: Any) -> Prediction:
    return remembered.predicted(find_weightless(model), resolve(recipe), **request)


def test_the_same_question_is_answered_from_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = predictor(monkeypatch)
    assert ask(batch=2) == ask(batch=2) == PREDICTION
    assert len(made.requests) == 1
    for other in ({"batch": 3}, {"recipe": "fp16"}, {"model": "tiny-flux"}):
        ask(**({"batch": 2} | other))
    assert len(made.requests) == 4, "another question"
    monkeypatch.setattr(remembered, "_installed", lambda: "another vivace, or another diffusers")
    ask(batch=2)
    assert len(made.requests) == 5


def test_a_changed_configuration_is_another_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS / "tiny-sd", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    made = predictor(monkeypatch)
    ask(str(folder))
    ask(str(folder))
    assert len(made.requests) == 1
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text()) | {"norm_eps": 2e-5}
    path.write_text(json.dumps(config))
    ask(str(folder))
    assert len(made.requests) == 2


@pytest.mark.parametrize(
    "refusal",
    [NoEffect("so already", already_so=True), NoEffect("no layer"), Unsupported("no"), WorkloadError("size")],
)
def test_that_there_is_no_answer_is_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    made = predictor(monkeypatch, refusal)
    for _ in range(2):
        with pytest.raises(type(refusal), match=str(refusal)) as caught:
            ask()
        assert getattr(caught.value, "already_so", None) == getattr(refusal, "already_so", None)
    assert len(made.requests) == 1


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"model": 1}', b'["Unheard", "of", null]', b"\xff"])
def test_a_damaged_answer_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    made = predictor(monkeypatch)
    ask()
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert ask() == PREDICTION
    assert len(made.requests) == 2
    assert ask() == PREDICTION
    assert len(made.requests) == 2


def test_what_depends_on_the_real_model_is_not_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = predictor(monkeypatch)
    ask(recipe="prune(0.1)")
    ask(recipe="prune(0.1)")
    assert len(made.requests) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "file"))
    made = predictor(monkeypatch)
    assert ask() == ask() == PREDICTION
    assert len(made.requests) == 2


def test_an_answer_from_disk_needs_no_torch(cache: Path) -> None:
    """The real prediction here, the answer in a new process."""
    prediction = ask(recipe="bf16", batch=1)
    code = (
        "import sys; from vivace.runtime.memory.remembered import predicted; "
        "from vivace.recipes.resolve import resolve; "
        "from vivace.runtime.memory.weightless import find_weightless; "
        "print(predicted(find_weightless('tiny-sd'), resolve('bf16'), batch=1).peak_bytes); "
        "print([name for name in ('torch', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [str(prediction.peak_bytes), "[]"]


def test_what_a_card_is_answered_with_ships(cache: Path) -> None:
    """Seconds of CPU went into importing diffusers, and more into each prediction."""
    for model in ("sdxl", "qwen-image"):
        command = (
            "import sys; from vivace.cli import app\n"
            f"app(['plan', {model!r}, '--card', '8', '--json'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules, 'nothing is to be imported'"
        )
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        (change, *_) = json.loads(done.stdout)["changes"]
        assert change["fits_card"]
    assert not cache.exists()


@pytest.mark.long
def test_shipped_answers_are_those_of_today(cache: Path) -> None:
    recipe = "quantize(fp8)@denoiser,text_encoder+compile+offload(model)"
    model = find_weightless("flux2-klein-4b")
    shipped = remembered.predicted(model, resolve(recipe), batch=1, task="text")
    assert shipped == predict(model, resolve(recipe))


@pytest.mark.parametrize("question", [{"height": 512}, {"batch": 2}, {"text": "embeddings"}])
def test_other_questions_are_not_answered_by_what_ships(
    cache: Path, monkeypatch: pytest.MonkeyPatch, question: dict[str, Any]
) -> None:
    made = predictor(monkeypatch)
    assert ask("flux-dev", "baseline", **question) == PREDICTION
    assert len(made.requests) == 1


def test_other_libraries_than_those_of_the_shipped_answers(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = predictor(monkeypatch)
    monkeypatch.setattr(remembered, "versions", lambda: {"diffusers": "0.99"})
    assert ask("flux-dev", "baseline") == PREDICTION
    assert len(made.requests) == 1
