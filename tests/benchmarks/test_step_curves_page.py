"""The page of the curves, made of records: what dominates fewer steps and from where on, the front, the plot."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.step_cases import Case, write_cases
from benchmarks.step_curves import record_file
from docgen.step_curves import Against, families
from tests.make import make_record, make_round
from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.record import ImageRecord
from vivace.recipes.resolve import resolve

PROMPTS = tuple(f"image {k}" for k in range(8))
SCATTER = (-0.02, -0.01, -0.01, 0.0, 0.0, 0.01, 0.01, 0.02)


def _sha(recipe: str, index: int) -> str:
    return f"{abs(hash((recipe, index))):064x}"[-64:]


def case(recipe: str, work: float, ssim: float, seconds: float = 1.0) -> Case:
    """Images whose SSIMs scatter around `ssim`."""
    text = resolve(recipe).text
    pictures = tuple(
        ImageRecord(index=k, prompt=p, seed=0, sha256=_sha(text, k)) for k, p in enumerate(PROMPTS)
    )
    round_ = make_round(0, (seconds,) * 4, prompts=PROMPTS).model_copy(update={"pictures": pictures})
    record = make_record(text, round_)
    workload = record.trial.workload.model_copy(update={"prompts": PROMPTS})
    record = record.model_copy(update={"trial": record.trial.model_copy(update={"workload": workload})})
    figures = tuple(
        ImageFigures(
            sha256=picture.sha256,
            reference=_sha("baseline", picture.index),
            prompt=picture.prompt,
            alone={},
            against={} if text == "baseline" else {"ssim": ssim + SCATTER[picture.index], "psnr_db": 30.0},
        )
        for picture in pictures
    )
    return Case(record=record, figures=figures, scorer=None, work=work)


def write(folder: Path, cases: Sequence[Case], device: str = "cpu") -> Path:
    write_cases(folder / record_file("tiny-sd", device).name, cases)
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        [
            case("baseline", 1.0, 1.0),
            case("steps(18)", 0.8, 0.90),
            case("steps(13)", 0.5, 0.80),
            case("steps(7)", 0.25, 0.60),
            case("taylorseer(interval=2)", 0.8, 0.80),
            case("taylorseer(interval=4)", 0.5, 0.90),
            case("taylorseer(interval=8)", 0.25, 0.75, seconds=0.5),
            case("pyramid_attention(hits=0.5)", 0.8, 0.90),
            case("cfg_cutoff(0.4)", 0.2, 0.55),
        ],
    )


def test_each_recipe_is_held_against_fewer_steps_of_the_same_speed(results: Path) -> None:
    (family,) = families(results)
    points = {p.row.recipe: p for p in family.points}
    assert points["taylorseer(2)"].speedup == pytest.approx(1.25)
    assert points["taylorseer(2)"].against is Against.BELOW
    assert points["taylorseer(4)"].against is Against.ABOVE
    assert points["pyramid_attention(hits=0.5)"].against is Against.UNCLEAR
    assert points["steps(13)"].against is None
    assert points["cfg_cutoff(0.4)"].against is None, "so few steps were not drawn"
    front = {recipe for recipe, point in points.items() if point.on_front}
    assert "taylorseer(4)" in front
    assert "taylorseer(8)" in front
    assert "cfg_cutoff(0.4)" in front
    assert not front & {"steps(13)", "steps(7)", "taylorseer(2)"}
