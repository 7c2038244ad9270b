"""What a witness scores of images that are drawn: which models are asked how, and what is left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vivace.measure import scorer
from vivace.measure.calibrating import CalibrationImages, label, score_images
from vivace.measure.damage import DAMAGE, HARMLESS
from vivace.models.scorers import LocatedJudge, LocatedScorer

KINDS = {kind.name: kind for kind in DAMAGE}

PROMPTS = ("bright", "dark", "bright", "dark")
DARKER = KINDS["darker"]


class ScoresBrightness:
    """A stand-in for a BLIP: how bright an image is, or how dark if that is the prompt."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder

    def scores(self, image: Any, prompts: Sequence[str]) -> list[float]:
        level = float(np.asarray(image).mean())
        return [level if prompt == "bright" else 255 - level for prompt in prompts]


@pytest.fixture
def images(tmp_path: Path) -> CalibrationImages:
    drawn = CalibrationImages(tmp_path, PROMPTS)
    drawn.path(0).parent.mkdir()
    wave = 20 * np.sin(np.arange(48) / 8)[None, :, None] * np.ones((32, 1, 3))
    for k, prompt in enumerate(PROMPTS):
        level = 200 if prompt == "bright" else 60
        pixels = level + wave
        if k == 3:
            pixels = np.zeros_like(pixels)
        Image.fromarray(pixels.astype(np.uint8)).save(drawn.path(k))
    return drawn


def test_a_second_witness_is_asked_image_by_image(
    images: CalibrationImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "Witness", ScoresBrightness)
    judge = LocatedJudge("blip", LocatedScorer("blip", "1", Path("blip"), "real"))
    bright, dark, _, black = score_images(images, judge, [DARKER])
    assert bright.own == pytest.approx(200, abs=6)
    assert bright.others == pytest.approx(55, abs=6)
    assert bright.changed is not None
    assert dark.changed is not None
    assert set(bright.changed) == {
        *(change.name for change in HARMLESS),
        *(label(DARKER, grade) for grade in range(5)),
    }
    assert bright.changed["darker/4"] == pytest.approx(bright.own - 20, abs=1)
    assert dark.changed["darker/4"] == pytest.approx(dark.own + 20, abs=1)
    assert bright.changed["rounding"] == pytest.approx(bright.own, abs=0.5)
    assert black.faults == ("black",)
    assert black.changed is None
