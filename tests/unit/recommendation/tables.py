"""Rows and tables of evidence, and questions to them."""

from vivace.evidence.recommendation import Criteria, Recommendation
from vivace.evidence.recommendation.advise import recommend_from
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.stats import Interval
from vivace.recipes.resolve import resolve


def evidence(text: str, gain: float | None = None, width: float = 0.01, **fields: object) -> EvidenceRow:
    """A row whose baseline takes 10 s an image."""
    recipe = resolve(text)
    point = gain or 1.0
    values = {
        "latency": Interval(10 / point, 10 / point * (1 - width), 10 / point * (1 + width)),
        "gain": None if gain is None else Interval(point, point * (1 - width), point * (1 + width)),
        "peak_bytes": 20_000_000_000,
        "num_rounds": 2,
        **fields,
    }
    return EvidenceRow(
        recipe=recipe.text,
        num_techniques=len(recipe.techniques),
        same_picture=recipe.same_picture,
        **values,
    )


def table(
    *rows: EvidenceRow, kind: str = "own", gpu: str = "NVIDIA H100", model: str = "flux-dev", **fields: object
) -> EvidenceTable:
    rows = rows if any(row.recipe == "baseline" for row in rows) else (evidence("baseline"), *rows)
    values = {
        "kind": kind,
        "place": kind,
        "gpu": gpu,
        "model": model,
        "baseline": "baseline",
        "rows": rows,
        **fields,
    }
    return EvidenceTable(**values)


def ask(
    *tables: EvidenceTable, model: str = "flux-dev", gpu: str | None = "H100", **fields: object
) -> Recommendation:
    criteria = Criteria(model=model, gpu=gpu, **fields)
    return recommend_from(criteria, tables, with_predictions=False)
