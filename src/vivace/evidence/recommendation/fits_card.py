"""Find recipes that fit a card, for `vivace plan`: the ranking of `vivace recommend`, and its first recipe predicted to
fit.

The ranking's memory is recorded, or estimated to a few percent. Before a recipe is proposed, its memory is predicted as
`vivace plan --recipe` does, which takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from vivace.errors import NoEffect, RecipeError, Unsupported, WorkloadError
from vivace.evidence.committed import committed_tables
from vivace.evidence.community import community_tables
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.advise import prediction_of, recommend_from
from vivace.evidence.recommendation.criteria import Criteria
from vivace.evidence.recommendation.predicted_tables import Card
from vivace.evidence.recommendation.recommendation import RecipeFigures, Recommendation
from vivace.evidence.studies.published_tables import published_tables
from vivace.evidence.tables import EvidenceTable
from vivace.models.find import SYNTHETIC
from vivace.runtime.memory.fit import RESERVE_BYTES, fits
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints
from vivace.runtime.memory.weightless import Weightless

MOST_TRIED = 5
"""Most recipes whose memory is predicted; each takes seconds."""
_ESTIMATE_ERROR = 0.03
"""Relative error of a memory estimate: recipes that may fit are predicted, others are dropped."""


@dataclass(frozen=True)
class Fitting:
    """The recipes that fit a card.

    Attributes:
        answer: the ranking, the chosen recipe first.
        chosen: the figures of the first recipe that fits; its memory is in `prediction`.
        others: slower ones that fit, the fastest first; their memory is recorded or estimated.
    """

    answer: Recommendation
    chosen: RecipeFigures
    prediction: Prediction
    others: tuple[RecipeFigures, ...]


def fitting(
    model: Weightless, published: Prediction, card: Card, on_attempt: Callable[[str], None]
) -> Fitting | None:
    """Return the ranked recipes that fit a card too small for the published model; None if none does.

    Args:
        published: the prediction of the model without a recipe.
        on_attempt: called with each recipe before its memory is predicted.
    """
    estimated = (card.num_bytes - RESERVE_BYTES) * (1 + _ESTIMATE_ERROR) + RESERVE_BYTES
    answer = ranked(model.name, published, replace(card, num_bytes=estimated))
    ordered = _in_order(answer)
    for index, figures in enumerate(ordered[:MOST_TRIED]):
        on_attempt(figures.recipe)
        try:
            prediction = prediction_of(model, resolve(figures.recipe), published, figures.peak_bytes)
        except (NoEffect, RecipeError, Unsupported, WorkloadError):
            continue  # values from records of another model, or assumed by an estimate
        if fits(prediction, card.num_bytes):
            most = card.num_bytes - RESERVE_BYTES
            return Fitting(
                answer,
                figures,
                prediction,
                tuple(f for f in ordered[index + 1 :] if (f.peak_bytes or 0) <= most),
            )
    return None


def ranked(name: str, published: Prediction, card: Card) -> Recommendation:
    """Return the recommendation for a card, by the records that ship with vivace."""
    criteria = Criteria(
        model=name,
        gpu=card.gpu.name,
        max_bytes=card.num_bytes - RESERVE_BYTES if card.is_typical else None,
        task=published.task,
    )
    tables = [*committed_tables(), *community_tables(), *published_tables()]
    return recommend_from(
        criteria, [table for table in tables if _is_of(table, name, published)], card, published
    )


def _is_of(table: EvidenceTable, name: str, published: Prediction) -> bool:
    """Whether a table has the planned size and number of images. At the model's own size all of its tables count."""
    size, shipped = (published.height, published.width), footprints().get(name.removeprefix(SYNTHETIC))
    is_own_size = shipped is not None and size == (shipped.height, shipped.width)
    return published.batch == 1 and (is_own_size or (table.height, table.width) in ((None, None), size))


def _in_order(answer: Recommendation) -> list[RecipeFigures]:
    """Return the ranked recipes, each once, the fastest first; without times as they are ranked."""
    by_recipe: dict[str, RecipeFigures] = {}
    for figures in answer.ranking:
        if figures.num_techniques:
            by_recipe.setdefault(figures.recipe, figures)
    return sorted(
        by_recipe.values(), key=lambda figures: math.inf if figures.latency is None else figures.latency.point
    )
