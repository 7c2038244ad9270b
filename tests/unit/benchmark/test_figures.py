"""The quality pass through real workers: CLIP scores, the noise floor, several models in one command."""

from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.typed import run_vivace as run
from tests.unit.cli.test_commands import QUICK
from tinyworld import clip
from vivace.benchmark import Timing
from vivace.benchmark.store import Store
from vivace.models.prompts import PROMPT_SETS

TIMING = Timing(rounds=1, repeats=1, max_warmup=1)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CLIP model with random weights: its scores mean nothing, but the code is that of a real one."""
    folder = tmp_path_factory.mktemp("scorer") / "clip"
    clip.save(folder, clip.build())
    return folder


@pytest.mark.long
def test_images_are_scored_against_their_prompts_and_the_baseline(tmp_path: Path, scorer: Path) -> None:
    prompts = ["a red circle", "a blue square"]
    records = vivace.bench(
        "tiny-sd", ["baseline", "steps(1)"], prompts=prompts, num_inference_steps=2, timing=TIMING, store=tmp_path,
        scorer=str(scorer), device="cpu",
    )  # fmt: skip
    baseline, other = records.rows()
    folder = tmp_path / "pictures"
    (compared,) = records.comparisons
    assert (compared.quality.scorer or "").startswith(f"{scorer}@")
    from PIL import Image

    from vivace.benchmark.store.images import image_path
    from vivace.measure.scorer import ClipScorer

    judge = ClipScorer(scorer)
    pictures = [Image.open(image_path(folder, f.sha256)) for f in other.figures]
    originals = [Image.open(image_path(folder, f.reference)) for f in other.figures]
    expected = judge.scores(pictures, prompts)
    assert [f.alone["clip_score"] for f in other.figures] == pytest.approx(expected, abs=1e-3)
    alike = judge.similarities(pictures, originals)
    assert [f.against["clip_similarity"] for f in other.figures] == pytest.approx(alike, abs=1e-3)
    others = PROMPT_SETS["real"]
    mean = sum(judge.scores([originals[0]] * len(others), others)) / len(others)
    assert baseline.figures[0].alone["clip_score_of_others"] == pytest.approx(mean, abs=1e-3)


@pytest.mark.long
def test_the_noise_floor_is_generated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []

    class Listening:
        def __getattr__(self, name: str) -> Any:
            if name == "end_quality":
                return lambda num_scored, num_drawn, seconds: progress.append((num_scored, num_drawn))
            return lambda *args: None

    def bench(recipes: list[str]) -> list[Any]:
        return vivace.bench(
            "tiny-sd", recipes, num_inference_steps=2, timing=TIMING, store=tmp_path, device="cpu",
            progress=Listening(),
        )  # fmt: skip

    records = bench(["baseline", "tiny_vae"])
    bench(["baseline", "tiny_vae"])
    assert progress[0][1] == 6
    assert 12 <= progress[0][0] <= 18, "six images of each recipe, and those of the noise floor that differ"
    assert progress[1] == (0, 0)
    with Store.read_only(tmp_path) as store:
        floor = store.noise_floor(records[0].trial.key(records[0].environment))
    assert floor is not None
    assert (floor.recipe, floor.reason, len(floor.pictures)) == ("attention(math)", None, 6)


@pytest.mark.long
def test_limits_decide_the_exit_code(tmp_path: Path) -> None:
    recipes = ["--recipe", "baseline", "--recipe", "int4"]
    strict = run(tmp_path, "bench", *recipes, *QUICK, "--min-quality", "clip=off,match=off,ssim=1", code=1)
    assert "quantize(int4) fails on quality" in strict.stdout
    assert "quantize(int4): SSIM 0." in strict.stdout
    assert "failed_quality" in strict.stdout
    lenient = run(tmp_path, "bench", *recipes, *QUICK, "--min-quality", "clip=off,match=off,ssim=0.1")
    assert "failed_quality" not in lenient.stdout


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.9", "not NAME=VALUE"),
        ("colour=1", "NAME is one of clip, match, ssim, psnr_db, witness"),
        ("clip=good", "is not a number or off"),
        ("ssim=2", "at most 1.0"),
        ("clip=nan", "finite number"),
    ],
)
def test_wrong_limits(tmp_path: Path, value: str, message: str) -> None:
    done = run(tmp_path, "bench", "--recipe", "baseline", "--min-quality", value, code=2)
    assert message in done.stderr
    assert not (tmp_path / ".vivace").exists()
