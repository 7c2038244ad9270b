"""Damage at graded strengths."""

import numpy as np
import pytest

from vivace.measure.damage import DAMAGE, DamageKind
from vivace.measure.image_metrics import Pixels, colourfulness, luminance, sharpness

KINDS = {kind.name: kind for kind in DAMAGE}


def photograph() -> Pixels:
    """Return coloured shapes with edges, texture and smooth parts, 80 x 96 pixels."""
    y, x = np.mgrid[:80, :96]
    random = np.random.default_rng(0)
    image = np.stack([40 + 1.5 * x, 60 + y + 20 * np.sin(x / 3), 120 + 40 * (x > 48)], axis=-1)
    image[20:50, 30:60] = (200.0, 60.0, 40.0)
    return np.asarray(np.clip(np.rint(image + random.normal(0, 3, image.shape)), 0, 255))


def error(kind: DamageKind, strength: float) -> float:
    image = photograph()
    return float(((kind.apply(image, strength, seed=3) - image) ** 2).mean())


@pytest.mark.parametrize("kind", DAMAGE, ids=lambda kind: kind.name)
def test_every_kind_grows_with_its_strength_and_stays_an_image(kind: DamageKind) -> None:
    damaged = kind.apply(photograph(), kind.strengths[-1], seed=3)
    assert damaged.shape == (80, 96, 3)
    assert damaged.min() >= 0
    assert damaged.max() <= 255
    assert (damaged == np.rint(damaged)).all()
    assert (damaged == kind.apply(photograph(), kind.strengths[-1], seed=3)).all(), "the same places again"
    errors = [error(kind, strength) for strength in kind.strengths]
    assert len(errors) == 5, "one for each grade"
    assert 0 < errors[0] < errors[2] < errors[4]


def test_each_kind_damages_what_its_name_says() -> None:
    image = photograph()
    assert sharpness(KINDS["blur"].apply(image, 1.5)) < 0.2 * sharpness(image)
    assert sharpness(KINDS["halos"].apply(image, 1)) > 2 * sharpness(image)
    assert colourfulness(KINDS["less saturation"].apply(image, 80)) < 0.5 * colourfulness(image)
    assert luminance(KINDS["darker"].apply(image, 10)).mean() < luminance(image).mean() - 9
    coarse = KINDS["coarse chroma"].apply(image, 8)
    assert np.abs(luminance(coarse) - luminance(image)).mean() < 1
    black = KINDS["black patches"].apply(image, 15)
    assert 0.13 < (black == 0).all(axis=-1).mean() < 0.17
    assert len(np.unique(KINDS["banding"].apply(image, 32)[..., 0])) <= 9
    assert (KINDS["shift"].apply(image, 4)[:, 4:] == image[:, :-4]).all()
