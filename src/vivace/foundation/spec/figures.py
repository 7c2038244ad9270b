"""Metrics of one stored image, computed by the quality pass."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.spec.base import SparseSpec, Spec
from vivace.foundation.spec.record import ImageRecord
from vivace.foundation.spec.workload import Workload


class FiguresKey(SparseSpec):
    """The conditions that an image's metrics depend on.

    Attributes:
        sha256: of the image.
        reference: sha256 of the baseline's image of the same prompt and seed.
        scorer: the CLIP model, NAME@REVISION; None without one.
        source, mask: of the image that the image was made from, and its mask, the sha256 of their pixels; None for
            text.
    """

    omits = ("source", "mask")

    sha256: str
    reference: str
    prompt: str
    scorer: str | None = None
    source: str | None = None
    mask: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the image is the same file as its reference."""
        return self.sha256 == self.reference


def key_of(image: ImageRecord, reference: str, workload: Workload, scorer: str | None) -> FiguresKey:
    """Return the key of the metrics of a workload's image."""
    source = workload.source_of(image.index)
    return FiguresKey(
        sha256=image.sha256,
        reference=reference,
        prompt=image.prompt,
        scorer=scorer,
        source=None if source is None else source.image,
        mask=None if source is None else source.mask,
    )


class ImageFigures(FiguresKey):
    """Metrics of an image.

    Attributes:
        alone: metrics of the image itself (see `vivace.measure.image_metrics`). With a scorer also `clip_score`, and
            for a reference `clip_score_of_others`: its mean score for prompts other than its own. With a source also
            `outside_match` and `outside_psnr_db` (outside of the mask, where nothing should change), or
            `source_match`; with a scorer `source_similarity`, and for a reference `source_similarity_of_others`: to
            other sources than its own.
        against: metrics against the reference. With a scorer also `clip_similarity`. Empty for identical images, whose
            PSNR is infinite.
        reason: why `against` is empty, unless the image is its own reference.
        thumbnail: the image at 16 x 16 pixels, RGB of 0 to 255, packed by `vivace.foundation.spec.figures`. What
            `vivace.report.variety` compares; None in stores of older versions.
        embedding: the scorer's, a unit vector, packed likewise; None without one.
    """

    alone: dict[str, float]
    against: dict[str, float]
    reason: str | None = None
    thumbnail: str | None = None
    embedding: str | None = None

    @property
    def key(self) -> FiguresKey:
        """The key alone, without the metrics."""
        return FiguresKey(
            **{name: getattr(self, name) for name in FiguresKey.model_fields},
        )

    @property
    def is_identical(self) -> bool:
        """Whether the image has the same pixels as its reference."""
        return self.is_reference or self.reason == SAME_PIXELS


SAME_PIXELS = "the same pixels"
"""The stored `reason` of an image with its reference's pixels in another file."""


class NoiseFloor(Spec):
    """The baseline's images, generated again with a change that should not matter.

    Attributes:
        recipe: the baseline's recipe with that change.
        reason: why there are no images.
    """

    recipe: str
    pictures: tuple[ImageRecord, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class QualityPass:
    """The results of the quality pass of one run; empty if there was none."""

    figures: Mapping[FiguresKey, ImageFigures] = field(default_factory=dict)
    scorer: str | None = None
    floor: NoiseFloor | None = None


def packed(values: Iterable[float] | NDArray[np.float64]) -> str:
    """Return numbers as base64 of little-endian float16, an array row by row."""
    return base64.b64encode(np.asarray(values, dtype="<f2").tobytes()).decode("ascii")


def unpacked(text: str) -> NDArray[np.float64]:
    """Reverse `packed`, into a flat array."""
    return np.frombuffer(base64.b64decode(text), dtype="<f2").astype(np.float64)
