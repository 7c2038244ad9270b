"""The trials of a study, with an estimate of time and memory for each, where there is any evidence.

In this order: the store's own rounds of the trial; vivace's committed records of the architecture, on the GPU that they
name; for time, roughly what its baseline takes there; for memory on a GPU, the prediction of `vivace plan`. Everything
else is unknown.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.answers.answer import Answer, Section, Table
from vivace.answers.formatting import count, seconds, size
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Embedded
from vivace.benchmark.store import Store
from vivace.errors import NoEffect, StoreError, VivaceError
from vivace.evidence.recorded import recorded_figures
from vivace.evidence.studies.expand import ModelPart
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.workload import Workload
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import workload_of
from vivace.techniques.compile import Compile
from vivace.techniques.steps import Steps

_CALLS = 10  # timed calls of a round where the number is not fixed
_WARM_UP = 4  # calls before them, mostly
_COMPILING_S = 60.0
_AUTOTUNING_S = 600.0
"""Added to a first call where no record has the time that the model compiles: on full-size models 20 to 340 s, and more
than 400 s with max-autotune (UNet and VAE of SD 1.5 on an H100)."""

_RECORD, _PLAN = "record of ", "plan"
"""Sources of figures of GPUs."""

Predict = Callable[[str, str, Workload], int | None]


@dataclass(frozen=True)
class Estimate:
    """One trial.

    Attributes:
        call_s: seconds per image; None if unknown.
        trial_s: seconds of all its rounds; None if unknown.
        peak_bytes: None if unknown.
        time_from, memory_from: the sources of the estimates, or the reason why there is none.
        refused: why its techniques conflict; then it is not measured.
        rounds_left: rounds that the store lacks.
        is_rough: whether the time is that of the baseline, as if the recipe changed only the number of steps
            that are computed.
        compiling_s: the part of a rough `trial_s` that is compiling with an empty cache.
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
    is_rough: bool = False
    compiling_s: float = 0.0

    @property
    def time_is_of_gpu(self) -> bool:
        """Whether the time is of a GPU, possibly another machine's."""
        return self.time_from.startswith(_RECORD)

    @property
    def memory_is_of_gpu(self) -> bool:
        """Whether the peak is of a GPU, possibly another machine's."""
        return self.memory_from == _PLAN or self.memory_from.startswith(_RECORD)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def estimates(
    planned: Sequence[ModelPart],
    store: Path | None,
    predict: Predict | None = None,
    *,
    on_gpu: bool = True,
) -> list[Estimate]:
    """Return each trial of a study, in order, with its estimate.

    Args:
        store: None: as if nothing had been measured.
        predict: returns the peak of a recipe on a GPU; None: nothing is predicted.
        on_gpu: whether the study runs on a GPU; if not, figures of GPUs are left out.

    Raises:
        UsageError, UnknownModel, Unsupported, WorkloadError: what would end the study before its first round.
    """
    records = [] if store is None else _stored(store)
    estimates = []
    for model_part in planned:
        workload = workload_of(
            _without_download(model_part.measured_on),
            model_part.study.workload,
            model_part.study.workload.batches[0],
        )
        same = {model_part.measured_on, SYNTHETIC + model_part.measured_on}  # random weights take as long
        for case in model_part.cases:
            about = (model_part.part.name, model_part.model, model_part.measured_on, case.label, case.recipe)
            if case.refused is not None:
                estimates.append(Estimate(*about, refused=case.refused))
                continue
            mine = [
                record
                for record in records
                if record.trial.model.name in same
                and record.trial.recipe.text == case.recipe
                and record.trial.workload == workload
            ]
            # Random weights have no images: only the timed calls are made.
            images = workload.num_images if model_part.study.quality.enabled else 0
            estimates.append(
                _estimate(about, workload, model_part.study.timing, images, mine, predict, on_gpu)
            )
    return estimates


def _without_download(name: str) -> LocatedModel:
    """Find a model, without looking up on the hub those that the catalogue has."""
    entry = CATALOGUE.get(name)
    if entry is not None and not isinstance(entry.origin, Embedded):
        return find_model(SYNTHETIC + name)
    return find_model(name)


def _estimate(
    about: tuple[str, str, str, str, str],
    workload: Workload,
    timing: Timing,
    images: int,
    mine: Sequence[Record],
    predict: Predict | None,
    on_gpu: bool,
) -> Estimate:
    """Return the estimate of a trial, from its own records, the committed ones and `predict`.

    Args:
        about: part, model, what is measured, row and recipe.
        images: how many are drawn for the quality pass.
    """
    recipe = about[4]
    rounds_left = timing.rounds
    for record in mine[:1]:
        done = sum(r.outcome is Outcome.MEASURED for r in record.rounds)
        if record.outcome.is_final:
            rounds_left = max(0, timing.rounds - done) if record.outcome is Outcome.MEASURED else 0
        samples = [s.total_s / workload.batch for r in record.rounds for s in r.samples]
        if record.outcome is Outcome.MEASURED and samples:
            call_s = statistics.median(samples)
            peak = max((r.memory.peak_bytes for r in record.rounds if r.memory), default=None)
            source = f"this store, {record.environment.device_name}"
            first = record.rounds[0].first_call_s or call_s
            trial_s = _trial_s(call_s, first, timing, rounds_left, images)
            return Estimate(
                *about, call_s, trial_s, peak, source, source if peak else "unknown", None, rounds_left
            )
        if record.outcome is not Outcome.MEASURED and record.outcome.is_final:
            why = f"this store: {record.outcome.value.replace('_', ' ')}"
            return Estimate(*about, time_from=why, memory_from=why, rounds_left=0)
    if not on_gpu:
        return Estimate(*about, rounds_left=rounds_left)
    name = about[2].removeprefix(SYNTHETIC)
    committed = None
    if workload.task == "text":  # as the committed records are
        committed = recorded_figures(
            name, recipe, workload.height, workload.width, workload.num_inference_steps
        )
    if committed is not None:
        call_s = committed.seconds(workload.num_inference_steps)
        trial_s = _trial_s(call_s, committed.first_call_s, timing, rounds_left, images)
        source = f"{_RECORD}{committed.device}"
        return Estimate(*about, call_s, trial_s, committed.peak_bytes, source, source, None, rounds_left)
    peak = None if predict is None else predict(about[2], recipe, workload)
    memory_from = "unknown" if peak is None else _PLAN
    rough = _roughly(name, recipe, workload) if workload.task == "text" else None
    if rough is None:
        return Estimate(*about, peak_bytes=peak, memory_from=memory_from, rounds_left=rounds_left)
    call_s, first_s, compiling_s, source = rough
    trial_s = _trial_s(call_s, first_s, timing, rounds_left, images)
    trial_s += compiling_s if rounds_left else 0.0  # later rounds find the code in the compiler's cache
    return Estimate(
        *about,
        call_s=call_s,
        trial_s=trial_s,
        peak_bytes=peak,
        time_from=source,
        memory_from=memory_from,
        rounds_left=rounds_left,
        is_rough=True,
        compiling_s=compiling_s,
    )


def _roughly(name: str, recipe: str, workload: Workload) -> tuple[float, float, float, str] | None:
    """Return the seconds of a call, of an eager first call and of compiling, with their sources.

    None if the baseline has no record.
    """
    resolved = resolve(recipe)
    own = workload.num_inference_steps
    base = recorded_figures(name, BASELINE, workload.height, workload.width, own)
    if base is None:
        return None
    steps = next((estimate.steps for estimate in resolved if isinstance(estimate, Steps)), own)
    skipped = max(
        (estimate.known_hits or 0.0 for estimate in resolved if isinstance(estimate, StepCache)), default=0.0
    )
    call_s = base.rest_s + (1 - skipped) * steps * base.step_s
    compiled = recorded_figures(name, "compile", workload.height, workload.width, own)
    usual_s = _COMPILING_S if compiled is None else compiled.first_call_s
    compiling_s = [
        _AUTOTUNING_S if "autotune" in estimate.mode else usual_s
        for estimate in resolved
        if isinstance(estimate, Compile)
    ]
    source = f"{_RECORD}{base.device}, of the baseline: rough, marked ~"
    return call_s, base.first_call_s, max(compiling_s, default=0.0), source


def _trial_s(call_s: float, first_s: float, timing: Timing, rounds: int, num_images: int) -> float:
    """Return the seconds of a trial's rounds: first call, warm-up and timed calls of each, and the images once."""
    calls = timing.repeats or min(_CALLS, max(6, int(timing.max_seconds / call_s)))
    warm = min(_WARM_UP, timing.max_warmup)
    images = max(0, num_images - calls) if rounds else 0
    return rounds * (first_s + (warm + calls) * call_s) + images * call_s


def _stored(folder: Path) -> list[Record]:
    """Return all records of a store, the newest first; none if there is no store."""
    try:
        store = Store.read_only(folder)
    except StoreError:
        return []
    with store:
        keys = dict.fromkeys(key for run in reversed(store.runs()) for key in run.keys)
        return [record for key in keys if (record := store.record(key)) is not None]


def planner(report: Callable[[str], None]) -> Predict:
    """Return a function that predicts a recipe's peak on a GPU as `vivace plan` does; it takes seconds for each.

    Args:
        report: receives a line before each prediction.
    """
    from vivace.runtime.memory.predict import predict
    from vivace.runtime.memory.weightless import Weightless, find_weightless

    models: dict[str, Weightless] = {}

    @functools.cache
    def peak(name: str, recipe: str, workload: Workload) -> int | None:
        report(f"predicting {name}, {recipe}")
        try:
            if name not in models:
                models[name] = find_weightless(name)
            return predict(
                models[name],
                resolve(recipe),
                height=workload.height,
                width=workload.width,
                batch=workload.batch,
                task=workload.task,
            ).peak_bytes
        except NoEffect as error:  # it changes nothing, so its memory is the baseline's
            return peak(name, BASELINE, workload) if error.already_so and recipe != BASELINE else None
        except VivaceError:
            return None

    return peak


def answer_of(estimates: Sequence[Estimate], *, without_gpu: bool = False) -> Answer:
    """Return the trials by part and model, and the total of the study.

    Args:
        without_gpu: whether this machine has no GPU, so that a GPU's figures are not this machine's.
    """
    groups: dict[tuple[str, str, str], list[Estimate]] = {}
    for estimate in estimates:
        groups.setdefault((estimate.part, estimate.model, estimate.measured_on), []).append(estimate)
    is_elsewhere = without_gpu and any(each.time_is_of_gpu or each.memory_is_of_gpu for each in estimates)
    note = (
        "This machine has no GPU: these times and peaks are a GPU's, and nothing is known of its CPU. --device cpu "
        "leaves them out."
    )
    data = [estimate.to_json() for estimate in estimates]
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
    """Return e.g. "12 min" for longer times."""
    if number < 120:
        return seconds(number)
    return f"{number / 60:.0f} min" if number < 7200 else f"{number / 3600:.1f} h"


def _cells(estimate: Estimate, without_gpu: bool) -> tuple[str, str, str]:
    if estimate.refused is not None:
        return "refused", "–", "–"
    about = "~" if estimate.is_rough else ""
    call = "unknown" if estimate.call_s is None else about + seconds(estimate.call_s)
    trial = "unknown" if estimate.trial_s is None else about + _long(estimate.trial_s)
    if without_gpu and estimate.time_is_of_gpu:
        call += " (GPU)"
    if estimate.call_s is None and estimate.rounds_left == 0:
        call = trial = estimate.time_from.removeprefix("this store: ")
    elif estimate.rounds_left == 0:
        trial = "stored"
    peak = "unknown" if estimate.peak_bytes is None else size(estimate.peak_bytes)
    return call, trial, f"{peak} (GPU)" if without_gpu and estimate.memory_is_of_gpu else peak
