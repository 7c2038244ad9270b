"""The fastest known recipe of each model and card: the one source of every page that names it.

A candidate keeps the image (only rounding or the order of sums differs), runs on one GPU, and was timed with random
weights at the model's own size and number of steps; where no record has that many steps, the most that one has count.
A recipe counts once, as the records that ship with vivace have it: the best of several would be the luckiest. What
owners of cards reported counts on cards that these records lack, and is marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import every_model, technique_cases
from benchmarks.committed_tables import gain_apart
from benchmarks.technique_cases import RESULTS
from benchmarks.technique_records import read_records
from docs.technique_lines import lines_of
from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables
from vivace.evidence.community import community_tables
from vivace.evidence.tables import EvidenceTable
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.report.summary import ratio, seconds, size
from vivace.report.text_table import markdown_lines

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
        calls_s: the timed calls, where they are too few for an interval.
        record: the file's path in the repository.
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
    calls_s: tuple[float, ...] = ()

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
        steps = f"{best.steps}" if (best.steps or 0) >= native else f"{best.steps} of {native}"
        steps += "" if best.timed_steps is None else f", from {best.timed_steps}"
        start = ["-", "-"] if self.baseline is None else [_time(self.baseline), _peak(self.baseline)]
        recipe = f"`{best.recipe}`".replace("|", "\\|")
        if best.recipe == BASELINE:
            gain = "1"
        elif best.gain is None:
            gain = "-"
        else:
            over = "" if best.reference == BASELINE else f" over `{best.reference}`"
            between = _between_calls(best, self.baseline)
            gain = f"{between or ratio(best.gain)}{f' {APART}' if best.is_apart else ''}{over}"
            recipe = recipe if best.is_surely_faster or between else f"not proven: {recipe}"
        card = best.card.removeprefix("NVIDIA ")
        record = f"[{'reported by others' if best.is_reported else 'record'}](../{best.record})"
        return [best.model, card, steps, *start, recipe, _time(best), gain, _peak(best), record]


def _between_calls(best: Measurement, baseline: Measurement | None) -> str:
    """Return the least and the most speed-up of a few calls of each, which have no interval; "" if they overlap."""
    if baseline is None or not best.calls_s or not baseline.calls_s:
        return ""
    least, most = min(baseline.calls_s) / max(best.calls_s), max(baseline.calls_s) / min(best.calls_s)
    number = max(len(best.calls_s), len(baseline.calls_s))
    return f"{least:.2f} to {most:.2f}x ({number} calls each)" if least > 1 + ONE_ROUND_MARGIN else ""


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
    return [_fastest_of(groups[pair]) for pair in pairs]


def _is_candidate(measured: Measurement) -> bool:
    model = CATALOGUE.get(measured.model)
    if model is None or measured.steps is None or measured.height != model.height:
        return False
    try:
        recipe = resolve(measured.recipe)
    except RecipeError:  # of an older vivace: nobody can run it any more
        return False
    return recipe.same_picture and all(call.name != "parallel" for call in recipe.techniques)


def _fastest_of(group: Sequence[Measurement]) -> Fastest:
    group = [measured for measured in group if not measured.is_reported] or group
    native = CATALOGUE[group[0].model].num_inference_steps
    numbers = {measured.steps for measured in group if measured.steps is not None}
    steps = native if native in numbers else max(numbers)
    alike: dict[str, Measurement] = {}
    for measured in group:
        if measured.steps == steps:
            alike.setdefault(measured.recipe, measured)
    best = min(alike.values(), key=lambda measured: measured.latency.point)
    baseline = _baseline_of(best, [measured for measured in group if measured.steps == steps])
    if baseline is not None and best.gain is None:
        gain = gain_apart(best.latency, baseline.latency)
        best = replace(best, gain=gain, reference=BASELINE, is_apart=True)
    return Fastest(best, baseline)


def _baseline_of(best: Measurement, group: Sequence[Measurement]) -> Measurement | None:
    """Return the model as published: as the same record has it, if the recipe was compared with that."""
    baselines = [measured for measured in group if measured.recipe == BASELINE]
    beside = [m for m in baselines if m.record == best.record and best.reference == BASELINE]
    return next(iter(beside or baselines), None)


@cache
def all_measurements(results: Path = RESULTS) -> tuple[Measurement, ...]:
    """Return what the committed records say of full-size models on GPUs.

    Args:
        results: the folder of the records.
    """
    own = every_model.RECORD.name
    fused = sorted(
        path.name for name in ("flux-fused-*.json", "fused-*-cards.json") for path in results.glob(name)
    )
    beside = sorted(path.name for path in results.glob("fused-model-*.json"))
    techniques = {technique_cases.record_file(name).name: name for name in technique_cases.FAMILIES}
    measurements = [*of_every_model(read_records(results / own), _place(own))]
    for file, name in techniques.items():
        measurements += _of_techniques(name, read_records(results / file), _place(file))
    others = {_place(name) for name in (own, *fused, *beside, *techniques)}
    for evidence in committed_tables():
        if evidence.place not in others and evidence.random_weights and not evidence.profiled:
            measurements += _of_table(evidence)
    for reported in community_tables():
        if reported.random_weights:
            place = f"results/community/{reported.place}"
            measurements += [replace(m, record=place, is_reported=True) for m in _of_table(reported)]
    for file in beside:
        measurements += of_every_model(read_records(results / file), _place(file))
    for file in fused:
        for record in read_records(results / file):
            measurements += _of_row(rows_of([record])[0], _place(file), None)
    for path in sorted(results.glob("tune-*.json")):
        measurements += _of_search(json.loads(path.read_text(encoding="utf-8")), _place(path.name))
    return tuple(measurements)


def _place(file: str) -> str:
    return f"results/{file}"


def of_every_model(records: Iterable[Record], place: str) -> Iterator[Measurement]:
    """Yield the rows of `python -m benchmarks.every_model`, each model's compared with its baseline."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.trial.model.name, []).append(record)
    for group in groups.values():
        group.sort(key=lambda record: record.trial.recipe.text != BASELINE)
        for row in rows_of(group):
            yield from _of_row(row, place, group[0])


def _of_row(row: Row, place: str, baseline: Record | None) -> Iterator[Measurement]:
    if row.latency is None:
        return
    workload = row.record.trial.workload
    yield Measurement(
        model=row.model.removeprefix(SYNTHETIC),
        card=row.record.environment.device_name,
        height=workload.height,
        steps=workload.num_inference_steps,
        recipe=row.recipe,
        latency=row.latency.median,
        peak_bytes=None if row.memory is None else row.memory.peak_bytes,
        gain=None if baseline is None else row.speedup,
        reference=BASELINE if baseline is None else baseline.trial.recipe.text,
        record=place,
        num_rounds=len(row.record.rounds),
        is_apart=baseline is not None and not cards_of(row.record) <= cards_of(baseline),
        is_encoded_before=workload.text == "embeddings",
        calls_s=tuple(s for r in row.latency.samples_s for s in r) if row.latency.median.low is None else (),
    )


def cards_of(record: Record) -> set[object]:
    """Return which cards a record's rounds were measured on; empty if they did not say."""
    return {card for r in record.rounds if (card := r.conditions.get("gpu_uuid")) is not None}


def _of_techniques(name: str, records: Sequence[Record], place: str) -> Iterator[Measurement]:
    """Yield the rows of `python -m benchmarks.every_technique`, scaled to the model's own number of steps."""
    full = technique_cases.full_length(name)
    for line in lines_of(name, records):
        for measured in _of_row(line.row, place, None):
            yield replace(
                measured,
                steps=full,
                latency=line.latency,
                gain=line.speedup,
                reference=technique_cases.baseline(name),
                timed_steps=None if line.steps == full else line.steps,
            )


def _of_table(evidence: EvidenceTable) -> Iterator[Measurement]:
    for row in evidence.rows:
        if row.latency is None or row.batch != 1 or row.is_counted:
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
            record=evidence.place,
            num_rounds=row.num_rounds,
            timed_steps=row.timed_steps,
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
