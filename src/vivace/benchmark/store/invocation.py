"""One run of a comparison in a store, and its purpose."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vivace.foundation.spec.workload import Workload


class Purpose(StrEnum):
    """The purpose of a run."""

    COMPARISON = "comparison"
    """Recipes that a user named: `vivace bench`."""
    STUDY = "study"
    """A part of a study."""
    PAIRS = "pairs"
    """Two recipes, pair by pair: `vivace compare`."""
    CALIBRATION = "calibration"
    """A setting of a step cache."""
    BASELINE = "baseline"
    """Part of a search: the baseline alone."""
    SCREENING = "screening"
    """Part of a search: a few calls, without quality."""
    JUDGEMENT = "judgement"
    """Part of a search: full steps, with the quality of a few images."""
    FINAL = "final"
    """Part of a search: interleaved with the baseline, in several rounds."""
    IMAGES = "images"
    """Part of a search: further images of a final's recipes."""


@dataclass(frozen=True)
class Invocation:
    """One run of a comparison.

    Attributes:
        started_at: UTC, ISO 8601.
        keys: of its trials, the baseline first.
        scorer: NAME@REVISION of the CLIP model; None without one.
        rounds: of each trial that were asked for; None in stores of an earlier format.
    """

    started_at: str
    command: str
    keys: tuple[str, ...]
    scorer: str | None = None
    rounds: int | None = None
    purpose: Purpose = Purpose.COMPARISON


def purpose_of_earlier(command: str, rounds: int | None, workload: Workload) -> Purpose:
    """Return the purpose of a run that an earlier format stored without one.

    Args:
        workload: of its baseline. Searches draw the images of a final at seeds from 1, those before it at seed 0.
    """
    words = command.split()[:2]
    if words != ["vivace", "tune"]:
        others = {"compare": Purpose.PAIRS, "study": Purpose.STUDY, "calibrate": Purpose.CALIBRATION}
        return others.get(words[-1] if words else "", Purpose.COMPARISON)
    if (rounds or 1) > 1:
        return Purpose.FINAL
    if workload.seeds[0] > 0:
        return Purpose.IMAGES
    return Purpose.JUDGEMENT if len(workload.prompts) > 1 else Purpose.SCREENING
