"""The trials of a study, with an estimate of time and memory for each, where there is any evidence.

In this order: the store's own rounds of the trial; vivace's committed records of the architecture, on the GPU that they
name; for time roughly what the baseline takes there, for memory the prediction of `vivace plan`. All else is unknown.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vivace.answers.answer import Answer, Section, Table
from vivace.answers.formatting import count, seconds, size
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Embedded
from vivace.benchmark.store import Store
from vivace.errors import NoEffect, StoreError, VivaceError
from vivace.evidence.recorded import recorded_figures
from vivace.evidence.studies.expand import ModelPart, StudyRow
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.workload import Workload
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import workload_of
from vivace.techniques.steps import Steps

_CALLS = 10  # timed calls of a round where the number is not fixed
_WARM_UP = 4  # calls before them, mostly
_RECORD, _PLAN = "record of ", "plan"
"""Sources of figures of GPUs."""
_ROUGH = ", of the baseline: rough, without compiling, marked ~"

Predict = Callable[[str, str, Workload], int | None]


@dataclass(frozen=True)
class Estimate:
    """One trial.

    Attributes:
        time_from, memory_from: the sources of the estimates, or the reason why there is none.
        refused: why its techniques conflict; then it is not measured.
    """

    part: str
    model: str
    measured_on: str
    row: str
    recipe: str
    call_s: float | None = None
    trial_s: float | None = None
    peak_bytes: int | None = None
    time_from: str = "unknown"
    memory_from: str = "unknown"
    refused: str | None = None
    rounds_left: int = 0

    @property
    def time_is_of_gpu(self) -> bool:
        return self.time_from.startswith(_RECORD)

    @property
    def memory_is_of_gpu(self) -> bool:
        return self.memory_from == _PLAN or self.memory_from.startswith(_RECORD)


def estimates(
    planned: Sequence[ModelPart],
    store: Path | None,
    predict: Predict | None = None,
    *,
    on_gpu: bool = True,
) -> list[Estimate]:
    """Return each trial of a study, in order, with its estimate."""
    records = [] if store is None else _stored(store)
    estimates = []
    for part in planned:
        request = part.study.workload
        workload = workload_of(_without_download(part.measured_on), request, request.batches[0])
        names = {part.measured_on, SYNTHETIC + part.measured_on}  # random weights take as long
        of_part = [r for r in records if r.trial.model.name in names and r.trial.workload == workload]
        for case in part.cases:
            unknown = Estimate(part.part.name, part.model, part.measured_on, case.label, case.recipe)
            if case.refused is not None:
                estimates.append(replace(unknown, refused=case.refused))
                continue
            mine = next((r for r in of_part if r.trial.recipe.text == case.recipe), None)
            unknown = replace(unknown, rounds_left=part.study.timing.rounds)
            known = None if mine is None else _of_store(unknown, part, mine)
            if known is None and on_gpu:
                known = _of_gpu(unknown, part, case, workload, predict)
            estimates.append(known or unknown)
    return estimates


def _without_download(name: str) -> LocatedModel:
    entry = CATALOGUE.get(name)
    is_published = entry is not None and not isinstance(entry.origin, Embedded)
    return find_model(SYNTHETIC + name if is_published else name)


def _of_store(unknown: Estimate, part: ModelPart, record: Record) -> Estimate | None:
    """Return what the store's own rounds of a trial say; None if they end in nothing that counts."""
    if record.outcome is not Outcome.MEASURED:
        why = f"this store: {record.outcome.value.replace('_', ' ')}"
        is_final = record.outcome.is_final
        return replace(unknown, time_from=why, memory_from=why, rounds_left=0) if is_final else None
    call_s = (
        statistics.median(s.total_s for r in record.rounds for s in r.samples) / record.trial.workload.batch
    )
    peak = max((r.memory.peak_bytes for r in record.rounds if r.memory), default=None)
    source = f"this store, {record.environment.device_name}"
    left = max(0, part.study.timing.rounds - len(record.rounds))
    return replace(
        unknown,
        call_s=call_s,
        trial_s=_trial_s(part, record.trial.workload, call_s, record.rounds[0].first_call_s or call_s, left),
        peak_bytes=peak,
        time_from=source,
        memory_from=source if peak else "unknown",
        rounds_left=left,
    )


def _of_gpu(
    unknown: Estimate, part: ModelPart, case: StudyRow, workload: Workload, predict: Predict | None
) -> Estimate:
    """Return what records and `predict` say; a recipe without a record takes its steps as long as the baseline."""
    name, steps = part.measured_on.removeprefix(SYNTHETIC), workload.num_inference_steps
    shape = (workload.height, workload.width, steps)
    is_text = workload.task == "text"  # as the committed records are
    known = recorded_figures(name, case.recipe, *shape) if is_text else None
    rough = ""
    if known is not None:
        unknown = replace(unknown, peak_bytes=known.peak_bytes, memory_from=f"{_RECORD}{known.device}")
    else:
        peak = None if predict is None else predict(part.measured_on, case.recipe, workload)
        unknown = unknown if peak is None else replace(unknown, peak_bytes=peak, memory_from=_PLAN)
        known, rough = recorded_figures(name, BASELINE, *shape) if is_text else None, _ROUGH
        steps = next((each.steps for each in resolve(case.recipe) if isinstance(each, Steps)), steps)
    if known is None:
        return unknown
    call_s = known.seconds(steps)
    trial_s = _trial_s(part, workload, call_s, known.first_call_s, unknown.rounds_left)
    return replace(unknown, call_s=call_s, trial_s=trial_s, time_from=f"{_RECORD}{known.device}{rough}")


def _trial_s(part: ModelPart, workload: Workload, call_s: float, first_s: float, rounds: int) -> float:
    """Return the seconds of a trial's rounds: first call, warm-up and timed calls of each, and the images once."""
    timing = part.study.timing
    calls = timing.repeats or min(_CALLS, max(6, int(timing.max_seconds / call_s)))
    warm = min(_WARM_UP, timing.max_warmup)
    # Random weights have no images: only the timed calls are made.
    images = max(0, workload.num_images - calls) if rounds and part.study.quality.enabled else 0
    return rounds * (first_s + (warm + calls) * call_s) + images * call_s


def _stored(folder: Path) -> list[Record]:
    try:
        store = Store.read_only(folder)
    except StoreError:
        return []
    with store:
        keys = dict.fromkeys(key for run in reversed(store.runs()) for key in run.keys)
        return [record for key in keys if (record := store.record(key)) is not None]


def planner(report: Callable[[str], None]) -> Predict:
    """Return a function that predicts a recipe's peak on a GPU as `vivace plan` does; it takes seconds for each."""
    from vivace.runtime.memory.predict import predict
    from vivace.runtime.memory.weightless import find_weightless

    model_of = functools.cache(find_weightless)

    @functools.cache
    def peak(name: str, recipe: str, workload: Workload) -> int | None:
        report(f"predicting {name}, {recipe}")
        shape = {field: getattr(workload, field) for field in ("height", "width", "batch", "task")}
        try:
            return predict(model_of(name), resolve(recipe), **shape).peak_bytes
        except NoEffect as error:  # it changes nothing, so its memory is the baseline's
            return peak(name, BASELINE, workload) if error.already_so and recipe != BASELINE else None
        except VivaceError:
            return None

    return peak


def answer_of(estimates: Sequence[Estimate], *, without_gpu: bool = False) -> Answer:
    """Return the trials by part and model, and the total of the study."""
    groups: dict[tuple[str, str, str], list[Estimate]] = {}
    for estimate in estimates:
        groups.setdefault((estimate.part, estimate.model, estimate.measured_on), []).append(estimate)
    is_elsewhere = without_gpu and any(each.time_is_of_gpu or each.memory_is_of_gpu for each in estimates)
    note = (
        "This machine has no GPU: these times and peaks are a GPU's, and nothing is known of its CPU. --device cpu "
        "leaves them out."
    )
    data: list[dict[str, Any]] = [asdict(estimate) for estimate in estimates]
    return Answer(
        command="study --dry-run",
        headline=_total(estimates, is_elsewhere),
        data=data,
        table=data,
        sections=tuple(_group(*about, rows, without_gpu) for about, rows in groups.items()),
        notes=(note,) if is_elsewhere else (),
    )


def _group(part: str, model: str, measured_on: str, rows: Sequence[Estimate], without_gpu: bool) -> Section:
    stand_in = "" if measured_on == model else f" ({measured_on})"
    sources = dict.fromkeys(s for each in rows for s in (each.time_from, each.memory_from) if s != "unknown")
    table = Table.of(
        ("recipe", "s/image", "trial", "peak"), [(each.recipe, *_cells(each, without_gpu)) for each in rows]
    )
    refused = tuple(f"{each.row}: refused: {each.refused}" for each in rows if each.refused)
    return Section(
        f"{model}{stand_in}, part {part}",
        (table, *(f"estimates from: {source}" for source in sources), *refused),
    )


def _total(estimates: Sequence[Estimate], is_elsewhere: bool) -> str:
    trials = {(each.measured_on, each.recipe): each for each in estimates if each.refused is None}.values()
    todo = [each for each in trials if each.rounds_left]
    known_s = [each.trial_s for each in todo if each.trial_s is not None]
    text = f"{count(len(trials), 'trial')}, {count(sum(each.rounds_left for each in todo), 'round')} to run"
    if known_s:
        where = " on such a GPU" if is_elsewhere else ""
        text += f": about {_long(sum(known_s))}{where} for {count(len(known_s), 'trial')}"
    unknown = len(todo) - len(known_s)
    return text + (f"; the time of {unknown} is unknown" if unknown else "")


def _long(number: float) -> str:
    if number < 120:
        return seconds(number)
    return f"{number / 60:.0f} min" if number < 7200 else f"{number / 3600:.1f} h"


def _cells(estimate: Estimate, without_gpu: bool) -> tuple[str, str, str]:
    if estimate.refused is not None:
        return "refused", "–", "–"
    about = "~" if estimate.time_from.endswith(_ROUGH) else ""
    call = "unknown" if estimate.call_s is None else about + seconds(estimate.call_s)
    trial = "unknown" if estimate.trial_s is None else about + _long(estimate.trial_s)
    peak = "unknown" if estimate.peak_bytes is None else size(estimate.peak_bytes)
    if estimate.rounds_left == 0:
        trial = "stored"
        if estimate.call_s is None:
            call = trial = estimate.time_from.removeprefix("this store: ")
    if without_gpu:
        call += " (GPU)" if estimate.time_is_of_gpu else ""
        peak += " (GPU)" if estimate.memory_is_of_gpu else ""
    return call, trial, peak
