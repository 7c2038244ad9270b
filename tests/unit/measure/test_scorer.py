"""Views of an image: what a scorer sees when its configuration asks for several zooms."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tinyworld import clip
from vivace.errors import UnknownModel
from vivace.measure.scorer import ClipScorer, zoomed
from vivace.models import find_scorer


def _square(side: int, size: tuple[int, int] = (128, 96)) -> Image.Image:
    """A white square in the middle of a black image."""
    array = np.zeros((size[1], size[0], 3), np.uint8)
    top, left = (size[1] - side) // 2, (size[0] - side) // 2
    array[top : top + side, left : left + side] = 255
    return Image.fromarray(array)


@pytest.mark.parametrize("zoom", [0.9, 0.96, 1.04, 1.1])
def test_a_zoom_enlarges_around_the_middle(zoom: float) -> None:
    seen = np.asarray(zoomed(_square(40), zoom), dtype=float).mean(axis=-1) / 255
    assert seen.shape == (96, 128)
    assert seen.sum() == pytest.approx((40 * zoom) ** 2, rel=0.02)
    for axis, centre in ((0, 47.5), (1, 63.5)):
        line = seen.sum(axis=1 - axis)
        assert (line * np.arange(len(line))).sum() / line.sum() == pytest.approx(centre, abs=0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    clip.save(tmp_path / "clip", clip.build())
    return tmp_path / "clip"


def _ask_for(folder: Path, zooms: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    if zooms is None:
        del config["zooms"]
    else:
        config["zooms"] = zooms
    (folder / "config.json").write_text(json.dumps(config))


def test_embeddings_are_the_mean_over_the_zooms(folder: Path) -> None:
    pictures = [_square(30, (128, 128)), _square(60, (128, 128))]
    _ask_for(folder, None)
    once = ClipScorer(folder)
    views = [once.embed_images([zoomed(p, zoom) for p in pictures]) for zoom in (0.96, 1.0)]
    _ask_for(folder, [0.96, 1.0])
    found = ClipScorer(folder).embed_images(pictures)
    mean = (views[0] + views[1]) / 2
    assert found == pytest.approx(mean / np.linalg.norm(mean, axis=-1, keepdims=True), abs=1e-6)
    assert not np.allclose(found, views[1], atol=1e-6), "one view is not the mean of two"


@pytest.mark.parametrize("zooms", [[], [1.0] * 10, [5.0], [0.5], ["1"], [True], 1.0, [float("nan")]])
def test_impossible_zooms_are_refused(folder: Path, zooms: object) -> None:
    _ask_for(folder, zooms)
    with pytest.raises(UnknownModel, match=r"zooms must be 1 to 9 numbers from 0\.9 to 1\.1"):
        ClipScorer(folder)


def test_the_embedded_scorer_has_those_of_its_training_script() -> None:
    config = json.loads((find_scorer("tiny-clip").folder / "config.json").read_text())
    assert tuple(config["zooms"]) == clip.ZOOMS
