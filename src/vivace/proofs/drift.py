"""Whether B's images get further from A's the later they are drawn, as where errors add up in a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vivace.proofs.image_findings import ImageFinding, RequestOf
from vivace.proofs.pair_figures import ROUNDING_DB, PairFigures

_LEAST_PAIRS = 10
_SURELY = 3.3
"""Standard deviations of a rank correlation by chance, beyond which growth is no chance (1 in 2,000)."""
_FURTHER_DB = 6.0
_EQUAL_DB = 100.0  # of images without any difference


def drifting(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether the distances grow in the order of drawing.

    The order is by prompt, again for each seed, so what prompts have to do with it shows no growth.
    """
    compared = [pair for pair in pairs if pair.against]
    if len(compared) < _LEAST_PAIRS:
        return []
    values = np.minimum([pair.against["psnr_db"] for pair in compared], _EQUAL_DB)
    third = len(compared) // 3
    first, last = (float(np.median(part)) for part in (values[:third], values[-third:]))
    if (
        last > min(first - _FURTHER_DB, ROUNDING_DB)
        or _correlation(-values) * math.sqrt(len(values) - 1) < _SURELY
    ):
        return []
    begin = "equal to" if first == _EQUAL_DB else f"{first:.0f} dB from"
    summary = (
        f"drift: B's images get further from A's the later they are drawn, from {begin} them to {last:.0f} dB"
    )
    return [ImageFinding(summary, compared[-1].label, request_of(compared[-1]))]


def _correlation(values: np.ndarray) -> float:
    """Return the rank correlation of values with their order (Spearman); equal values share their rank."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):
        ranks[values == value] = ranks[values == value].mean()
    if ranks.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
