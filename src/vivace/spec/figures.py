"""Figures of one stored picture: what the quality pass computed, kept per picture."""

from __future__ import annotations

from vivace.spec.base import Spec


class PictureFigures(Spec):
    """Figures of a picture alone, and against its reference: the baseline's picture of the same prompt and seed.

    `alone` and `against` are as in `vivace.measure.quality`. Identical pictures have no `against`: their PSNR is
    infinite. `reason` says why there is no `against` otherwise.
    """

    sha256: str
    reference: str
    alone: dict[str, float]
    against: dict[str, float]
    reason: str | None = None

    @property
    def is_identical(self) -> bool:
        return self.sha256 == self.reference
