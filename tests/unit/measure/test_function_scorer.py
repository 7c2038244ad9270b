"""`--scorer module:function`: a user's own function in the place of CLIP."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.typed import run_vivace
from vivace.benchmark.rounds.quality_pass import compute_figures
from vivace.benchmark.rounds.worker_requests import Scorer
from vivace.benchmark.store.images import save_image
from vivace.errors import UnknownModel, Unsupported
from vivace.foundation.spec.figures import FiguresKey
from vivace.measure.scorer import FunctionScorer
from vivace.models.scorers import find_scorer

RED = """
def how_red(images, prompts):
    levels = [image.getpixel((0, 0))[0] for image in images]
    return [level if "red" in prompt else 255 - level for level, prompt in zip(levels, prompts)]

def fails(images, prompts):
    raise ValueError("no licence")

def short(images, prompts):
    return [1.0]
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "redness", raising=False)
    (tmp_path / "redness.py").write_text(RED)


def test_its_scores_are_the_figures_that_the_gate_reads(tmp_path: Path) -> None:
    located = find_scorer("redness:how_red")
    (tmp_path / "redness.py").write_text(RED + "\n")
    assert find_scorer("redness:how_red").id != located.id, "other code is another scorer"
    shas = []
    for level in (200, 100):
        Image.new("RGB", (64, 64), (level, 0, 0)).save(tmp_path / "image.png")
        shas.append(save_image(tmp_path / "pictures", (tmp_path / "image.png").read_bytes()))
    keys = [FiguresKey(sha256=sha, reference=shas[0], prompt="a red wall", scorer=located.id) for sha in shas]
    baseline, other = compute_figures(tmp_path / "pictures", keys, Scorer.of(located), "cpu")
    assert (baseline.alone["clip_score"], other.alone["clip_score"]) == (200, 100)
    assert baseline.alone["clip_score_of_others"] < 200, "few of the other prompts are of something red"


def test_folders_are_judged_by_it(tmp_path: Path) -> None:
    prompts = ["a red wall", "a blue wall", "a red door", "a green door", "a red hat", "a black hat"]
    for folder, levels in (("a", (0, 255)), ("b", (120, 130))):
        for k, prompt in enumerate(prompts):
            (tmp_path / folder).mkdir(exist_ok=True)
            image = Image.effect_noise((64, 64), 60).convert("RGB")
            image.paste((levels["red" in prompt], 0, 0), (0, 0, 64, 40))
            image.save(tmp_path / folder / f"{k}.png")
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    arguments = ("quality", "a", "b", "--prompts", "prompts.txt", "--scorer", "redness:how_red", "--json")
    answer = json.loads(run_vivace(tmp_path, *arguments, code=1).stdout)
    assert answer["summary"]["clip_score"]["a"] == 255
    assert answer["quality"]["verdict"] == "failed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:score", "no module nowhere"),
        ("redness:how_rd", "how_red"),
        ("json.decoder:missing", "defines no missing"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_measured(name: str, says: str) -> None:
    with pytest.raises(UnknownModel, match=says):
        find_scorer(name)


def test_a_models_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UnknownModel, match="a model's folder, whose code is never run"):
        find_scorer("redness:how_red")


@pytest.mark.parametrize(
    ("function", "says"), [("fails", "no licence"), ("short", "2 images"), ("gone", "cannot be imported")]
)
def test_a_functions_failures_are_told_in_words(tmp_path: Path, function: str, says: str) -> None:
    with pytest.raises((Unsupported, UnknownModel), match=says):
        FunctionScorer(f"redness:{function}", tmp_path).scores([None, None], ["a", "b"])
