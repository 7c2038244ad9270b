"""Images of another seed are named if they are A's up to rounding."""

from typing import Any, cast

import numpy as np
from PIL import Image

from vivace.measure.image_metrics import match, pixels, thumbnail
from vivace.proofs.checks.image_findings import ImageFinding, switched
from vivace.proofs.checks.pair_figures import PairFigures
from vivace.proofs.sides.proof_store import KeptImage
from vivace.proofs.verdicts.same import OwnDistances, add_nearness

OWN = OwnDistances(({"psnr_db": np.inf, "match": 1.0},), ({"psnr_db": 12.0, "match": -0.5},))
SIDE = 48


class Drawn:
    """An image that is there."""

    is_there, faults, kept = True, (), KeptImage(None)

    def __init__(self, values: Any) -> None:
        self.pixels = pixels(Image.fromarray(values.round().clip(0, 255).astype(np.uint8)))
        self.size = (SIDE, SIDE)
        self.thumbnail, self.num_rectangles = thumbnail(self.pixels), 0


def scene(seed: int) -> Any:
    """Return a square at a random place of a grey image."""
    image = np.full((SIDE, SIDE, 3), 128.0)
    y, x = np.random.default_rng(seed).integers(0, SIDE - 16, 2)
    image[y : y + 16, x : x + 16] = (230, 40, 40)
    return image


def named(seeds: list[int], noise: float) -> list[ImageFinding]:
    """Return what is named where B draws the images of these seeds in the place of 0, 1, 2, ..."""
    pairs = []
    for seed, other in enumerate(seeds):
        a, b = (
            Drawn(scene(seed)),
            Drawn(scene(other) + np.random.default_rng(other).normal(0, noise, (SIDE, SIDE, 3))),
        )
        error = max(float(((a.pixels - b.pixels) ** 2).mean()), 1e-9)
        pair: Any = PairFigures("a red square", seed, cast(Any, a), cast(Any, b))
        pair.against = {"psnr_db": 10 * np.log10(255**2 / error), "match": match(b.pixels, a.pixels)}
        pairs.append(pair)
    add_nearness(pairs, OWN)
    return switched(pairs, lambda pair: "")


def test_the_exact_image_of_another_seed_is_named_even_once() -> None:
    (finding,) = named([0, 1, 2, 3, 4, 0, 6, 7], noise=0)
    assert finding.summary == "switched: 1 image of B is A's of another seed"


def test_images_like_those_of_other_seeds_are_not_named() -> None:
    """Only what A draws up to rounding is."""
    assert named([1, 2, 3, 4, 5, 6, 7, 100], noise=6) == []
    assert named([100, 101, 102, 103, 104, 0, 106, 107], noise=6) == []
