"""Figures of one stored picture: what the quality pass computed, kept per picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vivace.spec.base import Spec
from vivace.spec.record import Picture


class FiguresKey(Spec):
    """What figures depend on: the picture, the baseline's picture that it is held against, its prompt, the scorer.

    `scorer` is the CLIP model as "name@revision", None where none was used.
    """

    sha256: str
    reference: str
    prompt: str
    scorer: str | None = None

    @property
    def is_reference(self) -> bool:
        return self.sha256 == self.reference


class PictureFigures(FiguresKey):
    """Figures of a picture alone, and against its reference: the baseline's picture of the same prompt and seed.

    `alone` and `against` are as in `vivace.measure.quality`; with a scorer `alone` also holds `clip_score`, and of a
    reference `clip_score_of_others`, its mean score with prompts that are not its own; `against` holds
    `clip_similarity`. Identical pictures have no `against`: their PSNR is infinite. `reason` says why there is no
    `against` otherwise.
    """

    alone: dict[str, float]
    against: dict[str, float]
    reason: str | None = None

    @property
    def key(self) -> FiguresKey:
        return FiguresKey(
            sha256=self.sha256, reference=self.reference, prompt=self.prompt, scorer=self.scorer
        )

    @property
    def is_identical(self) -> bool:
        return self.is_reference or self.reason == SAME_PIXELS


SAME_PIXELS = "the same pixels"


class NoiseFloor(Spec):
    """The baseline drawn once more with a change that should not matter: how far apart the same picture can be.

    `recipe` is the baseline's with that change; `reason` says why there are no pictures.
    """

    recipe: str
    pictures: tuple[Picture, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class QualityPass:
    """All that a quality pass left behind for one run; empty where none was made."""

    figures: Mapping[FiguresKey, PictureFigures] = field(default_factory=dict)
    scorer: str | None = None
    floor: NoiseFloor | None = None
