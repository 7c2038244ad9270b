"""Find the most aggressive setting of each step cache whose images still pass the quality gate.

The search is a bisection. Each step of it benchmarks the cache and the baseline, with a quality pass. A cache is
controlled by its threshold, or by its share of cache hits if it has none. The bisection assumes that a more aggressive
setting gives worse images, which is true on average but not between every two settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vivace.benchmark.comparison import comparisons
from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.rounds.worker_requests import start_launcher
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.store.compared import Purpose
from vivace.benchmark.studies import run_study
from vivace.errors import Unsupported, UsageError, nearest
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import Study
from vivace.foundation.spec.timing import Timing
from vivace.foundation.stats.verdicts import Gate
from vivace.machinery.technique import Stage, Technique
from vivace.models.find import find_model
from vivace.report.rows import Row
from vivace.techniques import TECHNIQUES

CACHES: dict[str, type[Technique]] = {
    name: technique
    for name, technique in TECHNIQUES.items()
    if technique.declared.stage is Stage.CACHE and not technique.declared.needs_sources
}
_HITS = (0.1, 0.9)
_THRESHOLD_FACTOR = 4.0
"""Thresholds are searched from a quarter of the smallest value worth tuning to four times the largest."""


@dataclass(frozen=True)
class SettingTrial:
    """The result of one setting; without a hit rate and a speed-up it was not measured. `keeps`: the quality gate
    passed."""

    recipe: str
    setting: float
    keeps: bool
    outcome: str
    reason: str | None
    hit_rate: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Calibrated:
    """The most aggressive setting of one cache that passes the gate and skips steps, or the reason for having none; and
    all that were tried."""

    cache: str
    best: SettingTrial | None
    tried: tuple[SettingTrial, ...] = field(default=())
    reason: str | None = None


@dataclass(frozen=True)
class CacheSearch:
    """What is searched for the best settings of step caches.

    Attributes:
        caches: their names; empty for all of them.
        runs: maximum number of settings tried for each.
        prompt_set: prompts to generate; None for those that the model understands.
    """

    model: str
    caches: tuple[str, ...] = ()
    limits: Limits | None = None
    runs: int = 6
    prompt_set: str | None = None
    num_seeds: int | None = None
    device: str = "auto"
    threads: int | None = None
    store: str | Path = DEFAULT_STORE


def calibrate_caches(
    search: CacheSearch,
    on_tried: Callable[[SettingTrial], None] = lambda tried: None,
    progress: Progress = SILENT,
) -> list[Calibrated]:
    """Return the best setting of each cache. Settings that the store already holds are not measured again."""
    model, caches = search.model, search.caches
    for name in caches:
        if name not in CACHES:
            raise UsageError(f"no step cache '{name}'{nearest(name, CACHES)} (there are {', '.join(CACHES)})")
    located = find_model(model)
    if located.model.is_synthetic:
        raise Unsupported(
            f"{located.model.name} has random weights, so its images have no quality to keep; give a trained model"
        )
    chosen = search.prompt_set or located.prompt_set
    fields: dict[str, Any] = {
        "prompt_set": chosen,
        "num_seeds": search.num_seeds,
        "timing": Timing(rounds=1, repeats=5, max_warmup=2, threads=search.threads),
        "device": search.device,
        "rivals": False,
    }
    settings = RunSettings(store=search.store, progress=progress, purpose=Purpose.CALIBRATION)
    comparisons(Study.of(model, ["baseline"], **fields))  # report invalid input before anything starts
    with start_launcher(search.device) as launcher:

        def measure(recipe: str, setting: float) -> SettingTrial:
            study = Study.of(model, ["baseline", recipe], **fields)
            run = run_study(study, replace(settings, launcher=launcher))
            tried = _tried_from_row(run.rows(search.limits or DEFAULT_LIMITS)[1], setting)
            on_tried(tried)
            return tried

        return [_calibrate(name, search.runs, measure) for name in caches or CACHES]


def settings(cache: str) -> tuple[str, float, float]:
    """Return the knob that makes a cache more aggressive, and the lowest and highest value to search."""
    fields = CACHES[cache].knobs()
    if "threshold" not in fields:
        return "hits", *_HITS
    extra = fields["threshold"].json_schema_extra
    assert isinstance(extra, dict)
    tune: Any = extra["tune"]
    return "threshold", min(tune) / _THRESHOLD_FACTOR, max(tune) * _THRESHOLD_FACTOR


def bisected(low: float, high: float, runs: int, is_ratio: bool) -> Iterator[float]:
    """Yield settings to try, starting in the middle (the geometric mean for a ratio); `send` whether each passed the
    gate."""
    for _ in range(runs):
        middle = math.sqrt(low * high) if is_ratio else (low + high) / 2
        setting = float(f"{middle:.2g}")
        keeps = yield setting
        if keeps:
            low = middle
        else:
            high = middle


def _calibrate(name: str, runs: int, measure: Callable[[str, float], SettingTrial]) -> Calibrated:
    knob, low, high = settings(name)
    search: Any = bisected(low, high, runs, is_ratio=knob == "threshold")
    tried: dict[float, SettingTrial] = {}
    setting = next(search)
    while True:
        if setting not in tried:
            written = f"{setting:g}" if knob == "threshold" else f"hits={setting:g}"
            tried[setting] = measure(f"{name}({written})", setting)
        trial = tried[setting]
        if trial.outcome in (Outcome.UNSUPPORTED, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY):
            return Calibrated(name, None, tuple(tried.values()), trial.reason)
        try:
            # A setting without cache hits changes no image, so a more aggressive one may pass too.
            setting = search.send(trial.keeps or trial.outcome == Outcome.NO_EFFECT)
        except StopIteration:
            break
    kept = [trial for trial in tried.values() if trial.keeps]
    if not kept:
        return Calibrated(
            name, None, tuple(tried.values()), f"no setting from {min(tried):g} up passes the gate"
        )
    return Calibrated(name, max(kept, key=lambda trial: trial.setting), tuple(tried.values()))


def _tried_from_row(row: Row, setting: float) -> SettingTrial:
    record, judgement = row.record, row.judgement
    if record.outcome is not Outcome.MEASURED:
        return SettingTrial(row.recipe, setting, False, record.outcome, record.reason)
    gate = Gate.UNCLEAR if judgement is None else judgement.gate
    rate = record.rounds[0].evidence.get("cache_hit_rate")
    return SettingTrial(
        recipe=row.recipe,
        setting=setting,
        keeps=gate is Gate.PASSED,
        outcome=row.outcome,
        reason=None if judgement is None else f"{gate}: {judgement.reason}",
        hit_rate=None if rate is None else float(str(rate)),
        speedup=None if row.speedup is None else row.speedup.point,
    )
