"""From which strength a witness sees damage: with 90 % power, at a false alarm in 5 % of cases.

A witness sees damage in one pair of images if its value is beyond 95 % of its values for the harmless change that it
minds most. In a run of 39 pairs it looks at the mean. Errors are those of the choice of photographs: the photographs,
with all of their crops, are drawn again 200 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.photograph_witnesses import TWO_SIDED
from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.measure.calibrating import least_detected
from vivace.measure.damage import DAMAGE, HARMLESS
from vivace.proofs.checks.pair_figures import WITNESSES

RUN = 39
"""Images of a run of `vivace bench --prompt-set real`."""
FALSE_ALARM = 0.05
_DRAWS = 200
_COVERAGE = 0.9

LIMITS: dict[str, tuple[float, str]] = {
    "match": (1 - (DEFAULT_LIMITS.match or 1), "higher"),
    **{witness.name: (witness.margin, witness.worse) for witness in WITNESSES},
}
"""How far the mean of a run may be from its reference, and in which direction that is worse: the gate's limit on
`match`, and the margins of `vivace prove`."""

Values = NDArray[np.float64]


def seen_strengths(photographs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each witness and kind of damage.

    `single` and `run` are the least strengths that are seen in one pair, and in a run, with 90 % intervals over the
    photographs; None if the highest strength is not seen. A strength equal to the lowest that was measured is an upper
    bound. `power` is the share of single pairs that are seen at each strength. `limit` is the least strength at which
    the mean of a run is beyond the limit that vivace has for the witness, likewise; None without a limit.
    """
    witnesses = list(photographs[0]["harmless"][HARMLESS[0].name])
    return [row for witness in witnesses for row in _rows_of(witness, photographs)]


def _rows_of(witness: str, photographs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    sided = witness in TWO_SIDED
    random = np.random.default_rng(0)
    draws = [random.integers(len(photographs), size=len(photographs)) for _ in range(_DRAWS)]
    harmless = [[np.asarray(p["harmless"][change.name][witness]) for p in photographs] for change in HARMLESS]
    rows = []
    for kind in DAMAGE:
        damaged = [
            [np.asarray(p["damaged"][kind.name][grade][witness]) for p in photographs]
            for grade in range(len(kind.strengths))
        ]

        def powers(chosen: Sequence[int], damaged: list[list[Values]] = damaged) -> tuple[list[float], ...]:
            null = [np.concatenate([of[k] for k in chosen]) for of in harmless]
            values = [np.concatenate([of[k] for k in chosen]) for of in damaged]
            return (
                _single_powers(null, values, sided),
                _run_powers(null, values, sided),
                [_power_at_limit(witness, of) for of in values],
            )

        single, run, beyond = powers(range(len(photographs)))
        again = [powers(list(draw)) for draw in draws]
        rows.append(
            {
                "witness": witness,
                "damage": kind.name,
                "single": _with_error(single, [of for of, _, _ in again], kind.strengths),
                "run": _with_error(run, [of for _, of, _ in again], kind.strengths),
                "limit": _with_error(beyond, [of for _, _, of in again], kind.strengths)
                if witness in LIMITS
                else None,
                "power": [round(power, 3) for power in single],
            }
        )
    return rows


def _single_powers(null: Sequence[Values], values: Sequence[Values], sided: bool) -> list[float]:
    size = np.abs if sided else np.asarray
    limit = max(float(np.quantile(size(of), 1 - FALSE_ALARM)) for of in null)
    return [float((size(of) > limit).mean()) for of in values]


def _run_powers(null: Sequence[Values], values: Sequence[Values], sided: bool) -> list[float]:
    """Return the power of the mean of RUN values, which is nearly Gaussian."""
    normal = NormalDist()
    quantile = normal.inv_cdf(1 - FALSE_ALARM / (2 if sided else 1))
    limit = max(_size(of, sided) + quantile * _error(of) for of in null)
    return [normal.cdf((_size(of, sided) - limit) / max(_error(of), 1e-12)) for of in values]


def _power_at_limit(witness: str, values: Values) -> float:
    """Return the probability that the mean of a run is beyond the witness's limit; 0 without a limit."""
    if witness not in LIMITS:
        return 0.0
    limit, worse = LIMITS[witness]
    mean = float(values.mean())
    size = {"lower": -mean, "higher": mean, "either": abs(mean)}[worse]
    return NormalDist().cdf((size - limit) / max(_error(values), 1e-12))


def _size(values: Values, sided: bool) -> float:
    mean = float(values.mean())
    return abs(mean) if sided else mean


def _error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(RUN)


def _with_error(
    powers: Sequence[float], again: Sequence[Sequence[float]], strengths: Sequence[float]
) -> dict[str, float | None]:
    reached = [least_detected(of, strengths) for of in again]
    numbers = sorted(math.inf if value is None else value for value in reached)
    tail = (1 - _COVERAGE) / 2
    low, high = (numbers[round(share * (len(numbers) - 1))] for share in (tail, 1 - tail))
    return {
        name: None if value is None or math.isinf(value) else float(f"{value:.3g}")
        for name, value in (("strength", least_detected(powers, strengths)), ("low", low), ("high", high))
    }


def caption_figures(embeddings: dict[str, list[list[float]]], folder: Path) -> dict[str, float]:
    """Return how well CLIP tells which caption a crop belongs to: its share of right answers, chance, and the margin.

    Args:
        embeddings: of the crops of each photograph, by its caption.
        folder: of the CLIP model.
    """
    from vivace.measure.scorer import ClipScorer

    captions = list(embeddings)
    of_captions = ClipScorer(folder).embed_prompts(captions)
    rights, margins = [], []
    for k, crops in enumerate(embeddings.values()):
        scores = 100 * np.asarray(crops) @ of_captions.T
        rights.append(float((scores.argmax(axis=1) == k).mean()))
        others = np.delete(scores, k, axis=1).mean(axis=1)
        margins.append(float((scores[:, k] - others).mean()))
    spread = float(np.std(margins, ddof=1)) / math.sqrt(len(margins))
    return {
        "right": round(float(np.mean(rights)), 3),
        "chance": round(1 / len(captions), 3),
        "margin": round(float(np.mean(margins)), 2),
        "margin_error": round(spread, 2),
    }
