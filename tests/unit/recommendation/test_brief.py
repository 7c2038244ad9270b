"""What a person sees of a model on a card: eight lines, whose facts are those of the JSON, and a line that draws."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import pytest

import vivace
from tests.typed import typed
from tests.unit.recommendation.files import write_folder, write_fp8, write_gguf, write_sdxl, write_unet
from vivace.answers.answer import Answer
from vivace.answers.formatting import seconds, size
from vivace.answers.terminal import text_of
from vivace.cli import app
from vivace.evidence.recommendation import Recommendation
from vivace.evidence.recommendation.answer import answer_of
from vivace.evidence.recommendation.best import best_recipe
from vivace.recipes.resolve import resolve

PAIRS = [
    (model, gpu)
    for model in (
        "flux-dev",
        "sdxl",
        "sd15",
        "z-image-turbo",
        "qwen-image",
        "qwen-image-edit-2511",
        "tiny-sd",
        "sdxl-lightning-4step",
    )
    for gpu in ("RTX 3060", "RTX 4090", "H100", "T4", "cpu")
]
FILES = (write_sdxl, write_fp8, write_gguf, write_unet, write_folder)


@pytest.fixture(autouse=True)
def _no_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` leaves some in the folder where tests run."""
    monkeypatch.chdir(tmp_path)


def assert_brief(answer: Answer, model: str) -> list[str]:
    """Assert that an answer has eight lines at most, which say what its JSON says; return the words that draw."""
    lines = text_of(answer, width=80, details=False).splitlines()
    brief = answer.data["brief"]
    assert len(lines) <= 8
    assert all(len(line) <= 80 or line.startswith(("draw", "next")) for line in lines), lines
    said = {line.split()[0]: line[10:] for line in lines[2:]}
    assert [*said] == [
        "time",
        "memory",
        "images",
        "recipe",
        "draw" if brief["command"] else "next",
        "download",
    ]
    verdicts = {
        "as published": "fits",
        "with the recipe": "fits with this recipe",
        "no": "does not fit as published",
    }
    assert lines[0].partition(": ")[2] == verdicts.get(brief["fits"], "")
    if brief["latency"] is not None:
        assert f"{seconds(brief['latency']['point'])} an image, {brief['known']}" in said["time"]
    if brief["peak_bytes"] is not None:
        assert said["memory"].startswith(size(brief["peak_bytes"]))
    assert said["images"] == brief["images"] or not brief["images"]
    words = shlex.split(said.get("draw", "") or said["next"])
    assert (words[0], words[1]) == ("vivace", "generate" if brief["command"] else "plan")
    command = app.get_command(None, words[1])
    assert command is not None
    context = command.make_context(words[1], words[2:], parent=click.Context(app, obj={}))
    assert context.params["model"] == model
    return words


def assert_is_of(answer: Answer, of: Recommendation) -> None:
    """Assert that the lines are the recommendation's."""
    brief, chosen = answer.data["brief"], of.chosen
    assert brief["recipe"] == of.recipe
    if chosen is not None:
        assert (brief["latency"], brief["peak_bytes"]) == (
            chosen.latency and asdict(chosen.latency),
            chosen.peak_bytes,
        )
        assert brief["images"].startswith(("kept", "as published") if chosen.same_picture else "changed")


@pytest.mark.parametrize(("model", "gpu"), PAIRS)
def test_eight_lines_say_what_the_json_says(model: str, gpu: str) -> None:
    of = vivace.recommend(model, gpu=gpu, store=())
    answer = answer_of(of)
    words = assert_brief(answer, model)
    assert_is_of(answer, of)
    word = words[words.index("--recipe") + 1] if "--recipe" in words else ""
    if of.chosen is not None and word.startswith("best") and gpu != "cpu":
        assert best_recipe(word, model, gpu=of.gpu).recipe == of.recipe, "what it draws with is what was said"


@pytest.mark.parametrize("gpu", ["RTX 3060 12GB", "RTX 4090", "H200"])
@pytest.mark.parametrize("write", FILES, ids=lambda write: write.__name__)
def test_a_file_or_folder_is_answered_as_well(
    write: Callable[[Path], Path], gpu: str, tmp_path: Path
) -> None:
    path = str(write(tmp_path))
    of = vivace.recommend(path, gpu=gpu, store=())
    answer = answer_of(of)
    words = assert_brief(answer, path)
    assert_is_of(answer, of)
    assert of.recipe is not None
    assert words[1] == "generate"
    name, download = Path(path).name, answer.data["brief"]["download"]
    assert text_of(answer, details=False).startswith(name[:19])
    if write is write_unet:
        assert 0 < download["num_bytes"] < 3e9, "all but the UNet's 5 GB"
    if write is write_folder:
        assert download["num_bytes"] == 0


def test_a_file_in_fp8_stays_in_fp8(tmp_path: Path) -> None:
    """FLUX in fp8 was answered with nf4 and int8, which round it a second time."""
    path = str(write_fp8(tmp_path))
    for gpu, scheme in (("RTX 3060 12GB", "quantize(fp8_weight)"), ("RTX 4090", "quantize(fp8)")):
        answer = vivace.recommend(path, gpu=gpu, store=())
        assert answer.recipe is not None
        assert answer.recipe.startswith(scheme)
        assert not any(figures.recipe.startswith("quantize(nf4)@denoiser") for figures in answer.ranking)
    assert (vivace.recommend(path, gpu="H200", store=()).recipe or "").startswith("fused(fp8")


def test_what_cannot_be_told_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = str(vivace.recommend("cogview4-6b", gpu="RTX 4060 Ti", store=())).splitlines()
    assert lines[0] == "cogview4-6b on RTX 4060 Ti (8 GB): does not fit as published"
    assert lines[6].startswith("next      vivace plan cogview4-6b --gpu")


@pytest.mark.parametrize("gpu", ["RTX 3060 12GB", "H100"])
def test_plan_answers_with_the_same_lines(
    gpu: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said, data = [], []
    for command, as_json in (("recommend", ("--format", "json")), ("plan", ("--json",))):
        assert typed(monkeypatch, command, "sdxl", "--gpu", gpu) == 0
        said.append(capsys.readouterr().out.splitlines())
        assert typed(monkeypatch, command, "sdxl", "--gpu", gpu, *as_json) == 0
        data.append(json.loads(capsys.readouterr().out)["brief"])
    assert said[0] == said[1]
    assert data[0] == data[1]


def test_best_is_what_fits_where_the_model_does_not() -> None:
    """On a card that the published model does not fit, `best` was that model: all that fits is slower than it would
    be."""
    of = vivace.recommend("qwen-image", gpu="RTX 3060", store=())
    assert of.chosen is not None
    assert of.chosen.score.point < 1
    best = best_recipe("best", "qwen-image", gpu="RTX 3060")
    assert best.recipe == of.recipe
    assert "predicted" in best.why
    assert resolve(best.recipe).same_picture
