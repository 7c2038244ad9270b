"""The fastest known recipe of each model and card: the one source of every page that names it.

A candidate keeps the image (only rounding or the order of sums differs), runs on one GPU, and was timed with random
weights at the model's own size. Times of other numbers of steps are scaled to the model's own. A recipe counts as the
record that timed the most of these steps has it, and of several such records the shortest time: cards of one kind
differ by 2 or 3 %. All are records that ship with vivace, which `vivace recommend` reads. What owners of cards reported
counts on cards that these records lack, and is marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.committed_tables import APART as BESIDE_NONE
from benchmarks.committed_tables import ENCODED_BEFORE as WITHOUT_ENCODERS
from benchmarks.committed_tables import gain_apart
from benchmarks.technique_cases import RESULTS
from vivace.answers.formatting import ratio, seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables, community_tables
from vivace.evidence.recommendation.advise import at_own_steps
from vivace.evidence.recommendation.kin import kin_of
from vivace.evidence.tables import EvidenceTable
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve

HEADINGS = (
    "model", "card", "steps", "baseline", "peak", "fastest known", "s/image", "speed-up [95 % interval]", "peak",
    "record",
)  # fmt: skip
ENCODED_BEFORE, APART = "‡", "†"
MARKS = (
    f"{APART}: the baseline is of another run or card, so the interval allows for how much cards of one kind differ, "
    f"where it can.\n\n{ENCODED_BEFORE}: prompts are encoded before the call, which takes 25 ms of FLUX.1 [dev]'s "
    "baseline."
)


@dataclass(frozen=True)
class Measurement:
    """A recipe of a model as a record has it.

    Attributes:
        steps: of the image that `latency` is of.
        timed_steps: those that were timed, where the time is scaled from fewer.
        gain: over `reference`; None if it was not compared.
        is_apart: the reference is of another run or card.
        is_encoded_before: the call leaves the text encoders out.
        record: the file's path in the repository.
        is_of_few_calls: the ends of its intervals are those of its few calls.
        is_reported: an owner of the card sent it.
    """

    model: str
    card: str
    height: int | None
    steps: int | None
    recipe: str
    latency: Interval
    peak_bytes: int | None
    gain: Interval | None
    reference: str
    record: str
    num_rounds: int | None = None
    timed_steps: int | None = None
    is_apart: bool = False
    is_encoded_before: bool = False
    is_reported: bool = False
    is_of_few_calls: bool = False

    @property
    def is_surely_faster(self) -> bool:
        """Whether the interval of the gain, or what one round cannot tell from drift, leaves no doubt."""
        margin = ONE_ROUND_MARGIN if self.num_rounds == 1 else 0.0
        return self.gain is not None and self.gain.low is not None and self.gain.low > 1 + margin


@dataclass(frozen=True)
class Fastest:
    """The fastest known recipe of a model and card, and the model as published, if that was measured."""

    best: Measurement
    baseline: Measurement | None

    @property
    def cells(self) -> list[str]:
        best, native = self.best, CATALOGUE[self.best.model].num_inference_steps
        steps = f"{native}" + ("" if best.timed_steps is None else f", from {best.timed_steps}")
        start = ["-", "-"] if self.baseline is None else [_time(self.baseline), _peak(self.baseline)]
        recipe = f"`{best.recipe}`".replace("|", "\\|")
        if best.gain is None:
            gain = "-"
        else:
            over = "" if best.reference == BASELINE else f" over `{best.reference}`"
            of_calls = best.is_of_few_calls and best.gain.low is not None and best.gain.high is not None
            figure = (
                f"{best.gain.point:.2f}x, by few calls {best.gain.low:.2f} to {best.gain.high:.2f}"
                if of_calls
                else ratio(best.gain)
            )
            gain = f"{figure}{f' {APART}' if best.is_apart else ''}{over}"
            recipe = recipe if best.is_surely_faster else f"not proven: {recipe}"
        card = best.card.removeprefix("NVIDIA ")
        record = f"[{'reported by others' if best.is_reported else 'record'}](../{best.record})"
        return [best.model, card, steps, *start, recipe, _time(best), gain, _peak(best), record]


def _time(measured: Measurement) -> str:
    return seconds(measured.latency.point) + (f" {ENCODED_BEFORE}" if measured.is_encoded_before else "")


def _peak(measured: Measurement) -> str:
    return "-" if measured.peak_bytes is None else size(measured.peak_bytes)


def table(fastest: Iterable[Fastest], top: str = "../") -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        top: the way from the page to the repository's root.
    """
    rows = [[cell.replace("(../", f"({top}") for cell in row.cells] for row in fastest]
    return markdown_lines(HEADINGS, rows)


def filled(page: str, measurements: Sequence[Measurement]) -> str:
    """Return a page of docs/performance with the tables of the models that its marks name."""

    def block(mark: re.Match[str]) -> str:
        lines = table(fastest_known(measurements, mark[1].split()), top="../../")
        return "\n".join([f"<!-- fastest {mark[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- fastest ([\w. -]+?) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def fastest_known(measurements: Iterable[Measurement], models: Sequence[str] = ()) -> list[Fastest]:
    """Return the fastest of each model and card, in the catalogue's order.

    Args:
        models: only these; empty for all.
    """
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for measured in measurements:
        is_requested = not models or measured.model in models
        if is_requested and _is_candidate(measured):
            groups.setdefault((measured.model, measured.card), []).append(measured)
    order = {name: place for place, name in enumerate(CATALOGUE)}
    pairs = sorted(groups, key=lambda pair: order[pair[0]])
    return [fastest for pair in pairs if (fastest := _fastest_of(groups[pair])) is not None]


def _is_candidate(measured: Measurement) -> bool:
    model = CATALOGUE.get(measured.model)
    if model is None or measured.steps != model.num_inference_steps or measured.height != model.height:
        return False
    try:
        recipe = resolve(measured.recipe)
    except RecipeError:  # of an older vivace: nobody can run it any more
        return False
    return recipe.same_picture and all(call.name != "parallel" for call in recipe.techniques)


def _fastest_of(group: Sequence[Measurement]) -> Fastest | None:
    """Return the fastest; None where that is the model as published, or nothing else was measured."""
    group = [measured for measured in group if not measured.is_reported] or group
    by_recipe: dict[str, Measurement] = {}
    for measured in group:
        other = by_recipe.get(measured.recipe)
        if other is None or _trust(measured) < _trust(other):
            by_recipe[measured.recipe] = measured
    best = min(by_recipe.values(), key=lambda measured: measured.latency.point)
    if best.recipe == BASELINE:
        return None
    baseline = _baseline_of(best, group)
    if baseline is not None and best.gain is None:
        gain = gain_apart(best.latency, baseline.latency)
        best = replace(best, gain=gain, reference=BASELINE, is_apart=True)
    return Fastest(best, baseline)


def _trust(measured: Measurement) -> tuple[int, float]:
    """Return the steps that were not timed, and the time: less is better."""
    return abs((measured.steps or 0) - (measured.timed_steps or measured.steps or 0)), measured.latency.point


def _baseline_of(best: Measurement, group: Sequence[Measurement]) -> Measurement | None:
    """Return the model as published: as the same record has it, if the recipe was compared with that."""
    baselines = [measured for measured in group if measured.recipe == BASELINE]
    beside = [m for m in baselines if m.record == best.record and best.reference == BASELINE]
    return next(iter(beside or baselines), None)


@cache
def all_measurements(results: Path = RESULTS) -> tuple[Measurement, ...]:
    """Return what the committed records say of full-size models on GPUs, at the models' own number of steps.

    Args:
        results: the folder of the records.
    """
    measurements: list[Measurement] = []
    for evidence in (*committed_tables(), *community_tables()):
        if evidence.random_weights and not evidence.profiled:
            measurements += of_table(evidence)
    for path in sorted(results.glob("tune-*.json")):
        measurements += _of_search(json.loads(path.read_text(encoding="utf-8")), f"results/{path.name}")
    return tuple(measurements)


def of_table(evidence: EvidenceTable) -> Iterator[Measurement]:
    """Yield a table's rows of single images, at the model's own number of steps."""
    evidence = at_own_steps(evidence, kin_of(evidence.model, frozenset((evidence.model,))))
    is_reported = evidence.kind == "community"
    for row in evidence.rows:
        if row.latency is None or evidence.batch != 1 or row.batch != 1 or row.is_counted:
            continue
        yield Measurement(
            model=evidence.model,
            card=evidence.gpu,
            height=evidence.height,
            steps=evidence.steps,
            recipe=row.recipe,
            latency=row.latency,
            peak_bytes=row.peak_bytes,
            gain=row.gain,
            reference=evidence.baseline,
            record=f"results/community/{evidence.place}" if is_reported else evidence.place,
            num_rounds=row.num_rounds,
            timed_steps=row.timed_steps,
            is_of_few_calls=bool(row.calls_s),
            is_apart=BESIDE_NONE in row.note,
            is_encoded_before=WITHOUT_ENCODERS in row.note,
            is_reported=is_reported,
        )


def _of_search(answer: Mapping[str, Any], place: str) -> Iterator[Measurement]:
    """Yield the final rows of `vivace tune`."""
    if not answer["model"].startswith(SYNTHETIC):
        return
    for row in answer["final"]:
        if row["latency"] is None:
            continue
        latency, speedup = row["latency"], row["speedup"]
        yield Measurement(
            model=answer["model"].removeprefix(SYNTHETIC),
            card=answer["device"],
            height=row["workload"]["height"],
            steps=row["workload"]["num_inference_steps"],
            recipe=row["recipe"],
            latency=Interval(latency["median_s"], *(latency["ci95_s"] or (None, None))),
            peak_bytes=None if row["memory"] is None else row["memory"]["peak_bytes"],
            gain=None if speedup is None else Interval(speedup["ratio"], *(speedup["ci95"] or (None, None))),
            reference=BASELINE,
            record=place,
            num_rounds=row["rounds"],
        )
