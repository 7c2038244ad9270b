"""The page docs/performance/predictions.md: times that were predicted, beside those that others published."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from benchmarks.technique_cases import RESULTS
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.evidence.committed import committed_tables
from vivace.evidence.recommendation.advise import at_own_steps
from vivace.evidence.recommendation.kin import kin_of
from vivace.evidence.recommendation.predicted import Card, predicted_table, projected
from vivace.evidence.tables import EvidenceRow
from vivace.foundation.hardware import Near, known_gpu, near
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval
from vivace.runtime.memory.predict import Prediction

_COMPILED = "compile"
_HERE = "H100"
"""A card of which vivace has records: it is predicted as if there were none."""
_DIFFUSERS, _SGLANG = "diffusers", "sglang"


@dataclass(frozen=True)
class Published:
    """Seconds of a whole call of one image, in bf16, on one GPU, with every step computed.

    Attributes:
        steps: of the call.
        plan: the answer of `vivace plan MODEL --height 1024 --width 1024 --json` in results/, where the published size
            is 1024 px and not the model's own.
        program: that computed it; "diffusers" as it is, or with `compile`.
        source: in Markdown.
    """

    model: str
    card: str
    steps: int
    seconds: float
    program: str
    recipe: str
    source: str
    plan: str = ""


_WHEEL = (
    "https://github.com/sgl-project/sglang/blob/main/python/sglang/multimodal_gen/test/server/perf_baselines"
)
_ON_5090, _ON_H100 = (
    f"[CI's baselines of RTX 5090]({_WHEEL}/5090.json)",
    f"[CI's of H100]({_WHEEL}/h100.json)",
)
_COOKBOOK = "[cookbook](https://github.com/sgl-project/sgl-cookbook)"
_CACHE_DIT = "[cache-dit](https://github.com/vipshop/cache-dit/blob/main/docs/benchmark/NVIDIA_GPU.md)"
_PARA = "[ParaAttention](https://github.com/chengzeyi/ParaAttention)"
_XDIT = "[xDiT](https://github.com/xdit-project/xDiT)"
_TORCHAO = "[diffusers-torchao](https://github.com/sayakpaul/diffusers-torchao)"

FIGURES = (
    Published("flux-dev", "L20", 28, 24.85, _DIFFUSERS, BASELINE, _CACHE_DIT),
    Published("flux-dev", "L20", 28, 26.36, _DIFFUSERS, BASELINE, _PARA),
    Published("flux2-klein-base-4b", "RTX 5090", 50, 18.26, _SGLANG, _COMPILED, _ON_5090),
    Published("z-image-turbo", "RTX 5090", 9, 2.49, _SGLANG, _COMPILED, _ON_5090),
    Published("qwen-image-2.1", "RTX 5090", 40, 14.1, _SGLANG, _COMPILED, _COOKBOOK),
    Published("qwen-image-2.1", "RTX 4090", 40, 18.7, _SGLANG, _COMPILED, _COOKBOOK),
    Published("qwen-image-2.1", "RTX PRO 6000", 40, 8.03, _SGLANG, _COMPILED, _COOKBOOK),
    Published("qwen-image-2.1", "B200", 40, 2.46, _SGLANG, _COMPILED, _COOKBOOK),
    Published("flux-dev", _HERE, 28, 6.57, _DIFFUSERS, BASELINE, _TORCHAO),
    Published("flux-dev", _HERE, 28, 6.71, _DIFFUSERS, BASELINE, _XDIT),
    Published("flux-dev", _HERE, 28, 4.30, _DIFFUSERS, _COMPILED, _XDIT),
    Published("flux-dev", _HERE, 50, 6.69, _SGLANG, _COMPILED, _ON_H100),
    Published("flux2-dev", _HERE, 50, 23.1, _SGLANG, _COMPILED, _ON_H100),
    Published("flux2-klein-4b", _HERE, 4, 0.400, _SGLANG, _COMPILED, _ON_H100),
    Published("flux2-klein-base-4b", _HERE, 50, 6.11, _SGLANG, _COMPILED, _ON_H100),
    Published("z-image-turbo", _HERE, 9, 0.906, _SGLANG, _COMPILED, _ON_H100),
    Published("qwen-image", _HERE, 50, 12.77, _SGLANG, _COMPILED, _ON_H100),
    Published("ideogram-4", _HERE, 48, 21.0, _SGLANG, _COMPILED, _ON_H100, plan="plan-ideogram-4-1024.json"),
)
"""Every figure that was found with its card, model, steps and source; none was left out for how it fares."""


@dataclass(frozen=True)
class Scored:
    """A published time, the predicted one, and the GPU of the record it was predicted from, or "its operations"."""

    figure: Published
    predicted: Interval
    origin: str

    @property
    def is_inside(self) -> bool:
        low, high = self.predicted.low, self.predicted.high
        assert low is not None
        assert high is not None
        return low <= self.figure.seconds <= high

    @property
    def ratio(self) -> float:
        """Published over predicted."""
        return self.figure.seconds / self.predicted.point


def scored(figure: Published) -> Scored:
    """Predict a published time without any record of its card. Other numbers of steps take proportionally longer."""
    kin, gpu = kin_of(figure.model), known_gpu(figure.card)
    published = kin.published
    assert gpu is not None
    assert published is not None
    records = [at_own_steps(table, kin) for table in committed_tables()]
    if figure.plan:
        plan = json.loads((RESULTS / figure.plan).read_text(encoding="utf-8"))
        published = Prediction.model_validate({name: plan[name] for name in Prediction.model_fields})
        records = []  # they are of the model's own size
    card = Card(gpu, max(gpu.chip.memory_gb) * 1e9)
    table = predicted_table(kin, card, records, published)
    row = next(row for row in table.rows if row.recipe == figure.recipe)
    assert row.latency is not None
    factor = figure.steps / published.num_inference_steps
    low, high = row.latency.low, row.latency.high
    assert low is not None
    assert high is not None
    predicted = Interval(row.latency.point * factor, low * factor, high * factor)
    return Scored(figure, predicted, row.predicted_from or "")


_TEXT = """{note}
# Predictions, scored

`vivace recommend` predicts times for cards without a record, as an interval. Here it is asked for cards and models of
which others published a time of one image of 1024 px, in bf16 as far as they say. {summary}

{table}

**Other cards** are those of which vivace has no record. An **H100** is predicted as if it were one of them, from
records of an H200. sglang has kernels of its own, so its times are held against `compile` of diffusers: on an H200
FLUX.1 [dev] took it 3.82 s, diffusers 4.92 s, and 3.77 s compiled. That choice is ours: against `baseline` {plain}
lie inside. CI's times are those of 2026-08-16 (RTX 5090) and of sglang 0.5.23 (H100), the slowest of five runs and
5 % more. The cookbook's are over HTTP, and of a 4090 perhaps with a part of the model on the host; times of 2024 are of
older PyTorch. cache-dit's times of an RTX 5090 were not found in public text, and its L20's Qwen-Image, with the model
partly on the host, is not compared. Ideogram 4's own size is 2048 px. It is
predicted for 1024 px, at which sglang's CI draws, but in bf16, and CI takes [a file with weights in
fp8](https://github.com/sgl-project/sglang/pull/27279).

How the intervals come about:

- **From another card's record**: a call is arithmetic, which goes with the rate of the data sheet, and the rest, which
  waits for memory or for the host. What a record does not tell is bounded by what the cards allow: each reaches 0.5 to
  0.7 of its data sheet's rate, by its power cap, its clock and the version of PyTorch (an H200: [FLUX.1](flux.md)), and
  0.9 at most on another generation; the rest takes as long or, at most, longer by the ratio of the bandwidths; without
  a CUDA graph another host launches kernels up to 1.75 times faster or slower, as those of two H200 did (SDXL's
  baseline: 1.46 s and 2.52 s). The interval is from the least to the most of all of these together.
- **From its operations**: 0.6 of the data sheet's rate, and a factor of 1.6 either way.

No figure of these is taken from this table but the 0.9, which the L20's two times asked for: 6 of 8 lay inside on other
cards before. That the interval of a card of the same generation was too narrow was seen here, too: it had little more
than the measurement's own width, and 5 of 10 lay inside on an H100. Another test are recipes that vivace measured on
both an H100 and an H200: {both}. The hosts' factor comes from these.
"""


def page(note: str) -> str:
    """Return the page as Markdown; `note` stands above the heading."""
    results = [scored(figure) for figure in FIGURES]
    inside, pairs = between_cards()
    of_sglang = [scored(replace(figure, recipe=BASELINE)) for figure in FIGURES if figure.program == _SGLANG]
    return _TEXT.format(
        note=note,
        summary=summary(results),
        table="\n".join(_table(results)),
        plain=f"{sum(each.is_inside for each in of_sglang)} of its {len(of_sglang)}",
        both=f"in {inside} of {pairs} pairs\nof records the time on one lies inside what the other's record predicts",
    )


def between_cards() -> tuple[int, int]:
    """Return how many times of a recipe lie inside what another GPU's record of it predicts, and of how many."""
    rows: dict[tuple[str, str, int | None, str], list[tuple[str, EvidenceRow]]] = {}
    for table in committed_tables():
        if table.device != "cuda" or table.batch != 1:
            continue
        for row in at_own_steps(table, kin_of(table.model)).rows:
            if row.latency is not None:
                key = table.model, table.task, table.height, row.recipe
                rows.setdefault(key, []).append((table.gpu, row))
    inside = pairs = 0
    for (model, *_), records in rows.items():
        for (there, row), (here, other) in permutations(records, 2):
            if near(there, here) is Near.SAME:
                continue
            predicted = projected(row, there, kin_of(model), here)
            assert predicted is not None
            assert other.latency is not None
            pairs += 1
            inside += (predicted.low or 0) <= other.latency.point <= (predicted.high or 0)
    return inside, pairs


def summary(results: Sequence[Scored]) -> str:
    """Return how many published times lie inside, and on which side predictions err."""
    others = [each for each in results if each.figure.card != _HERE]
    counts = [
        f"{sum(each.is_inside for each in group)} of {len(group)} {where}"
        for group, where in (
            (results, "lie inside"),
            (others, "on other cards"),
            ([each for each in results if each.figure.card == _HERE], f"on an {_HERE}"),
            ([each for each in results if each.figure.program == _DIFFUSERS], "of diffusers itself"),
        )
    ]
    ratios = [each.ratio for each in results]
    middle = statistics.median(ratios)
    return (
        f"**{counts[0]}**: {', '.join(counts[1:])}. The published time is {middle:.2f} of the predicted one in the "
        f"median, {min(ratios):.2f} to {max(ratios):.2f}"
        + (": most predictions are too slow." if middle < 0.95 else ".")
    )


def _table(results: Sequence[Scored]) -> list[str]:
    headings = (
        "model, steps",
        "card",
        "program",
        "published, s",
        "predicted, s",
        "of",
        "from",
        "inside",
        "source",
    )
    rows = [
        [
            f"{CATALOGUE[each.figure.model].name}, {each.figure.steps}",
            each.figure.card,
            each.figure.program,
            f"{each.figure.seconds:g}",
            f"{each.predicted.point:.3g} [{each.predicted.low:.3g}, {each.predicted.high:.3g}]",
            f"`{each.figure.recipe}`",
            each.origin.removeprefix("NVIDIA "),
            "yes" if each.is_inside else f"no: {each.ratio:.2f} of it",
            each.figure.source,
        ]
        for each in results
    ]
    return markdown_lines(headings, rows)
