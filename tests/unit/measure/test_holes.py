"""Holes are seen in images that are the reference's elsewhere and in others; drawn squares are no holes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.drawn_shapes import draw
from vivace.measure.damage import blurred
from vivace.measure.image_metrics import hole_share, num_rectangles, pixels, resized

Pixels = NDArray[np.float64]
SIDE = 128


def scene(seed: int) -> Pixels:
    """Return an image with details of every size, as photographs have, and as smooth as a VAE's."""
    random = np.random.default_rng(seed)
    image = np.full((SIDE, SIDE, 3), 128.0)
    for cells, levels in ((3, 60), (12, 30), (48, 12)):
        image += resized(random.normal(0, levels, (cells, cells, 3)), SIDE, SIDE)
    return blurred(image, 0.7).round().clip(0, 255)


def with_square(image: Pixels, colour: tuple[int, int, int], side: int, y: int, x: int) -> Pixels:
    image = image.copy()
    image[y : y + side, x : x + side] = colour
    return image


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (255, 0, 255)])
@pytest.mark.parametrize(("side", "y", "x"), [(16, 31, 50), (24, 64, 64), (24, 0, 0), (40, 85, 9)])
def test_a_square_is_a_hole_in_the_same_image_and_in_another(
    colour: tuple[int, int, int], side: int, y: int, x: int
) -> None:
    image = with_square(scene(0), colour, side, y, x)
    assert hole_share(image, scene(0)) == pytest.approx(side**2 / SIDE**2, rel=0.01)
    assert num_rectangles(image) == 1


def test_a_flat_area_that_a_lossy_file_made_exact_is_none() -> None:
    reference = with_square(scene(0), (200, 40, 40), 32, 40, 40) + np.random.default_rng(0).integers(
        0, 2, (SIDE, SIDE, 1)
    )
    image = with_square(reference, (201, 41, 41), 32, 40, 40)
    assert hole_share(image, reference) == num_rectangles(image, reference) == 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_other_images_have_none(seed: int) -> None:
    assert (
        hole_share(scene(0), scene(seed)) == hole_share(scene(0), scene(0)) == num_rectangles(scene(0)) == 0
    )
    shapes = [pixels(draw("a red and a blue shape", each)) for each in (0, seed)]
    assert hole_share(*shapes) == 0, "squares that the reference has too, elsewhere"
    white = scene(0).clip(0, 160) * 255 / 160
    assert hole_share(white.round(), scene(seed)) == num_rectangles(white.round()) == 0, "white areas"
