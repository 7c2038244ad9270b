"""What each witness says of an image beside the same image before it was damaged."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from vivace.measure.image_metrics import Pixels, colourfulness, match, paired_metrics, thumbnail
from vivace.measure.scorer import ClipScorer
from vivace.models.scorers import EMBEDDED, LocatedScorer, find_scorer
from vivace.proofs.checks.pair_figures import WITNESSES, statistics_of

SLOW = ("SSIM", "tiny-clip")
TWO_SIDED = (*(witness.name for witness in WITNESSES), "colourfulness")
"""Witnesses whose value has a sign: it says in which direction an image moved."""
_BEST_PSNR = 100.0  # dB, for equal images


@functools.cache
def scorer() -> LocatedScorer:
    return find_scorer(EMBEDDED)


@functools.cache
def _clip() -> ClipScorer:
    return ClipScorer(scorer().folder)


def embed(image: Pixels) -> Pixels:
    """Return tiny-clip's embedding of an image."""
    from PIL import Image

    return np.asarray(_clip().embed_images([Image.fromarray(image.astype(np.uint8))])[0])


@dataclass(frozen=True)
class Reference:
    """An image before it is damaged, with its figures.

    Attributes:
        embedding: None to leave the slow witnesses out.
    """

    image: Pixels
    statistics: dict[str, float]
    colourfulness: float
    thumbnail: Pixels
    embedding: Pixels | None

    @classmethod
    def of(cls, image: Pixels, *, slow: bool) -> Reference:
        return cls(
            image,
            statistics_of(image),
            colourfulness(image),
            thumbnail(image),
            embed(image) if slow else None,
        )


def distances(image: Pixels, reference: Reference) -> dict[str, float]:
    """Return how far an image is from its reference by each witness, 0 for the same (PSNR: -100)."""
    original = reference.image
    values = {
        "match": 1 - match(image, original),
        "PSNR": -_psnr(image, original),
    } | _of_thumbnails(thumbnail(image) - reference.thumbnail)
    statistics = statistics_of(image)
    for witness in WITNESSES:
        values[witness.name] = witness.difference(
            reference.statistics[witness.name], statistics[witness.name]
        )
    values["colourfulness"] = colourfulness(image) - reference.colourfulness
    if reference.embedding is not None:
        values["SSIM"] = 1 - paired_metrics(image, original)["ssim"]
        values["tiny-clip"] = 100 * (1 - float(embed(image) @ reference.embedding))
    return values


def _psnr(image: Pixels, reference: Pixels) -> float:
    error = float(((image - reference) ** 2).mean())
    return min(_BEST_PSNR, 10 * float(np.log10(255.0**2 / error))) if error else _BEST_PSNR


def _of_thumbnails(change: Pixels) -> dict[str, float]:
    """Return the distances of the gate's variety: of thumbnails, and of thumbnails without their mean colour."""
    shapes = change - change.mean(axis=(0, 1))
    return {
        "colours": float(np.sqrt((change**2).mean())),
        "shapes": float(np.sqrt((shapes**2).mean())),
    }
