"""The differences among a recipe's images, compared with those among the baseline's.

A recipe that draws one image for all seeds is worse than the baseline, however good that image is. Every image is
stored with two descriptions: a thumbnail, and the embedding of the CLIP model that scored it. The distance of two
images is that of their descriptions. Three distances see different collapses:

    colours   of the thumbnails
    shapes    of the thumbnails without their mean colour: a copy that is brighter is a copy
    content   of the embeddings: a copy that is moved a little is nearly a copy

Distances differ between pairs of images by a hundred times, so each is compared with the baseline's distance of the
same prompts and seeds, by the logarithm of the ratio, as far as a quarter or four times. The share kept is 1 plus its
mean over log 4: 1 if both differ as much, 0 if the recipe's are four times nearer, 2 the other way round. A recipe with
other images that differ as much keeps 1 on average, since exchanging the two sides changes the sign.

The mean over all pairs of seeds sees images that are all nearer to each other; that of the closest pair of a prompt
sees that some are copies. The same is done for prompts: images of different prompts must differ too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.spec.figures import ImageFigures, unpacked
from vivace.foundation.stats import Interval, mean_interval

Vectors = NDArray[np.float64]

SURE_PASS, SURE_FAIL = 0.95, 0.9
"""Confidence that a passing recipe reaches the limit, and that a failing one does not. A ruined recipe that passes
misleads; a good one that fails costs a second look and more prompts. Chosen on the calibrated half of docs/quality.md,
where all from 0.55 to 0.93 judge alike."""
_FARTHEST = math.log(4)
_ROUNDING = {"colours": 0.5, "shapes": 0.5, "content": 0.01}
"""Added to both distances of a ratio: the distance that rounding to 8 bits gives equal images. Out of 255; of a unit
vector."""
_COPIES, _FAR = 2.5, 8.0
"""Thumbnails nearer than 2.5 levels of 255 are copies if the baseline's are 8 times as far apart. Noise with a standard
deviation of 10 levels, on images of 128 pixels, leaves 1.8."""
_MOST_IMAGES = 400
"""Images whose prompts are compared with each other: their pairs grow with the square."""


@dataclass(frozen=True)
class VarietyShare:
    """The kept share of the differences by one distance.

    Attributes:
        among: "seeds" of a prompt, or "prompts".
        bounds: the mean over prompts, its lower bound with 95 % confidence and its upper bound with 90 %.
    """

    among: str
    distance: str
    closest: bool
    bounds: Interval


@dataclass(frozen=True)
class Variety:
    """How much a recipe's images differ from each other, compared with the baseline's.

    Attributes:
        bounds: of the mean of all shares among seeds, or among prompts where each has one seed.
        num_seeds: of the prompts that have several, at most; 1 if none has.
        copies: the prompts all of whose images are copies of each other, while the baseline's are not.
    """

    bounds: Interval
    shares: tuple[VarietyShare, ...]
    num_seeds: int
    copies: tuple[str, ...]

    @property
    def lowest(self) -> VarietyShare:
        """The share that is most certain to be low."""
        return min(
            self.shares,
            key=lambda share: share.bounds.point if share.bounds.high is None else share.bounds.high,
        )


def variety(figures: Sequence[ImageFigures], references: Sequence[ImageFigures]) -> Variety | None:
    """Compare how much images differ; None if any was stored without a thumbnail, or if there is only one.

    Args:
        figures, references: of a recipe's images, and of the baseline's of the same prompts and seeds.
    """
    if any(row.thumbnail is None for row in (*figures, *references)):
        return None
    prompts = [row.prompt for row in figures]
    of_prompt = {p: [k for k, other in enumerate(prompts) if other == p] for p in dict.fromkeys(prompts)}
    sides = _descriptions(figures), _descriptions(references)
    seeds, across = [], []
    for distance in sides[0].keys() & sides[1].keys():
        of_recipe, of_baseline = (_distances(side[distance]) for side in sides)
        rounding = _ROUNDING[distance]
        seeds += _among_seeds(of_prompt, of_recipe, of_baseline, distance, rounding)
        across += _among_prompts(prompts, of_recipe, of_baseline, distance, rounding)
    main = seeds or across
    if not main:
        return None
    values: dict[str, list[float]] = {}
    for _, by_prompt in main:
        for prompt, value in by_prompt:
            values.setdefault(prompt, []).append(value)
    means = [(prompt, float(np.mean(of))) for prompt, of in values.items()]
    shares = [
        VarietyShare(*label, bounds=_over_prompts(by_prompt))
        for label, by_prompt in sorted((*seeds, *across), key=str)
    ]
    return Variety(
        bounds=_over_prompts(means),
        shares=tuple(shares),
        num_seeds=max(len(of) for of in of_prompt.values()),
        copies=_copies(of_prompt, *(_distances(side["colours"]) for side in sides)),
    )


_Label = tuple[str, str, bool]
_ByPrompt = list[tuple[str, float]]


def _descriptions(rows: Sequence[ImageFigures]) -> dict[str, Vectors]:
    """Return vectors (N, width) by distance."""
    thumbnails = np.stack([unpacked(row.thumbnail or "") for row in rows]).reshape(len(rows), -1, 3)
    shapes = thumbnails - thumbnails.mean(axis=1, keepdims=True)
    # The root of the mean square, in levels of 255, instead of the sum.
    scale = math.sqrt(thumbnails.shape[1] * 3)
    vectors = {
        "colours": thumbnails.reshape(len(rows), -1) / scale,
        "shapes": shapes.reshape(len(rows), -1) / scale,
    }
    if all(row.embedding is not None for row in rows):
        vectors["content"] = np.stack([unpacked(row.embedding or "") for row in rows])
    return vectors


def _distances(vectors: Vectors) -> Vectors:
    products = vectors @ vectors.T
    squares = np.diag(products)
    distances = np.sqrt(np.maximum(0.0, squares[:, None] + squares[None] - 2 * products))
    return np.asarray(distances)


def _shares(of_recipe: Vectors, of_baseline: Vectors, rounding: float) -> Vectors:
    ratios = np.log((of_recipe + rounding) / (of_baseline + rounding))
    return np.asarray(1 + np.clip(ratios / _FARTHEST, -1, 1))


def _among_seeds(
    of_prompt: dict[str, list[int]], of_recipe: Vectors, of_baseline: Vectors, distance: str, rounding: float
) -> list[tuple[_Label, _ByPrompt]]:
    """Return the share of each prompt that has several seeds: of all pairs, and of the closest."""
    everything, closest = [], []
    for prompt, images in of_prompt.items():
        if len(images) < 2:
            continue
        rows, columns = zip(*combinations(images, 2), strict=True)
        of_pairs = of_recipe[rows, columns], of_baseline[rows, columns]
        everything.append((prompt, float(_shares(*of_pairs, rounding).mean())))
        least_of_recipe, least_of_baseline = (np.asarray(distances.min()) for distances in of_pairs)
        closest.append((prompt, float(_shares(least_of_recipe, least_of_baseline, rounding))))
    if not everything:
        return []
    return [(("seeds", distance, False), everything), (("seeds", distance, True), closest)]


def _among_prompts(
    prompts: Sequence[str], of_recipe: Vectors, of_baseline: Vectors, distance: str, rounding: float
) -> list[tuple[_Label, _ByPrompt]]:
    """Return the share of each image: of its pairs with images of other prompts, and of the closest of these."""
    chosen = list(range(len(prompts)))[:_MOST_IMAGES]
    names = [prompts[k] for k in chosen]
    differs = np.array([[a != b for b in names] for a in names])
    if not differs.any(axis=1).all():
        return []
    recipe, baseline = (side[np.ix_(chosen, chosen)] for side in (of_recipe, of_baseline))
    shares = np.where(differs, _shares(recipe, baseline, rounding), 0.0).sum(axis=1) / differs.sum(axis=1)
    nearest = [np.where(differs, side, np.inf).min(axis=1) for side in (recipe, baseline)]
    of_closest = _shares(nearest[0], nearest[1], rounding)
    return [
        (("prompts", distance, False), [(name, float(s)) for name, s in zip(names, shares, strict=True)]),
        (
            ("prompts", distance, True),
            [(name, float(s)) for name, s in zip(names, of_closest, strict=True)],
        ),
    ]


def _copies(of_prompt: dict[str, list[int]], of_recipe: Vectors, of_baseline: Vectors) -> tuple[str, ...]:
    copied = []
    for prompt, images in of_prompt.items():
        grid = np.ix_(images, images)
        farthest = of_recipe[grid].max()
        if len(images) > 1 and farthest < _COPIES and of_baseline[grid].max() > _FAR * max(farthest, 0.5):
            copied.append(prompt)
    return tuple(copied)


def _over_prompts(by_prompt: _ByPrompt) -> Interval:
    prompts, values = zip(*by_prompt, strict=True)
    return bounds_of(values, prompts)


def bounds_of(values: Sequence[float], prompts: Sequence[str]) -> Interval:
    """Return the mean over prompts with what the gate compares with a limit: see SURE_PASS and SURE_FAIL."""
    lower, upper = (mean_interval(values, prompts, 2 * sure - 1) for sure in (SURE_PASS, SURE_FAIL))
    return Interval(lower.point, lower.low, upper.high)
