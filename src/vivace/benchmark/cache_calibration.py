"""The most aggressive setting of each step cache whose pictures still pass the quality gate.

Found by bisection over real bench runs, each of the cache beside the baseline, with a quality pass. A cache is set by
its threshold, or by its share of hits where it has none. More is taken to be worse for the pictures, which holds on the
whole and not from one setting to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.benchmark.comparison import comparisons
from vivace.benchmark.store import DEFAULT_STORE
from vivace.benchmark.studies import bench, start_launcher
from vivace.contract import Stage, Technique
from vivace.errors import Unsupported, UsageError, nearest
from vivace.models.find import find_model
from vivace.report.rows import Row
from vivace.spec.limits import DEFAULT_LIMITS, Limits
from vivace.spec.record import Outcome
from vivace.spec.study import Study
from vivace.spec.timing import Timing
from vivace.stats.gate import Gate
from vivace.techniques import TECHNIQUES

CACHES: dict[str, type[Technique]] = {
    name: technique for name, technique in TECHNIQUES.items() if technique.stage is Stage.CACHE
}
_HITS = (0.1, 0.9)
_BEYOND = 4.0
"""Thresholds are looked for from a quarter of the least that is worth tuning to four times the largest."""


@dataclass(frozen=True)
class Tried:
    """One setting. `hit_rate` and `speedup` are None where it was not measured; `keeps` says that the gate passed."""

    recipe: str
    setting: float
    keeps: bool
    outcome: str
    reason: str | None
    hit_rate: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Calibrated:
    """What was tried of one cache, in order, and the most aggressive setting that keeps the gate and does something.

    `reason` says why there is none.
    """

    cache: str
    best: Tried | None
    tried: tuple[Tried, ...] = field(default=())
    reason: str | None = None


def calibrate_caches(
    model: str,
    caches: Sequence[str] = (),
    *,
    limits: Limits | None = None,
    runs: int = 6,
    prompt_set: str | None = None,
    num_seeds: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    store: str | Path = DEFAULT_STORE,
    tell: Callable[[Tried], None] = lambda tried: None,
) -> list[Calibrated]:
    """Find each cache's setting. What the store holds of it already is not measured again.

    Args:
        caches: names of techniques; none: all.
        limits: of the quality gate.
        runs: settings tried of each cache, at most.
        prompt_set: what is drawn; None for "tinyworld" on embedded models and "real" on others.
        tell: called after each setting.

    Raises:
        UsageError: no such cache.
        Unsupported: the model's pictures show nothing.
        Other errors: see `vivace.bench`.
    """
    for name in caches:
        if name not in CACHES:
            raise UsageError(f"no step cache '{name}'{nearest(name, CACHES)} (there are {', '.join(CACHES)})")
    found = find_model(model)
    if found.model.is_synthetic:
        raise Unsupported(f"{found.model.name} has random weights: no quality can be kept of its pictures")
    chosen = prompt_set or ("tinyworld" if found.model.source == "embedded" else "real")
    asked: dict[str, Any] = {
        "prompt_set": chosen,
        "num_seeds": num_seeds,
        "timing": Timing(rounds=1, repeats=5, max_warmup=2, threads=threads),
        "device": device,
        "rivals": False,
    }
    comparisons(Study.of(model, ["baseline"], **asked))  # whatever is wrong is said before anything starts
    with start_launcher(device) as launcher:

        def measure(recipe: str, setting: float) -> Tried:
            run = bench(model, ["baseline", recipe], store=store, launcher=launcher, **asked)
            tried = _tried(run.rows(limits or DEFAULT_LIMITS)[1], setting)
            tell(tried)
            return tried

        return [_calibrated(name, runs, measure) for name in caches or CACHES]


def settings(cache: str) -> tuple[str, float, float]:
    """The knob that makes a cache more aggressive, and from where to where it is looked for."""
    fields = CACHES[cache].knobs()
    if "threshold" not in fields:
        return "hits", *_HITS
    extra = fields["threshold"].json_schema_extra
    assert isinstance(extra, dict)
    tune: Any = extra["tune"]
    return "threshold", min(tune) / _BEYOND, max(tune) * _BEYOND


def bisected(low: float, high: float, runs: int, is_ratio: bool) -> Iterator[float]:
    """Settings to try, the first in the middle; sent back is whether it keeps the gate.

    Args:
        is_ratio: the middle of 0.1 and 0.9 is 0.3, since what counts is by how many times one is the other.
    """
    for _ in range(runs):
        middle = math.sqrt(low * high) if is_ratio else (low + high) / 2
        setting = float(f"{middle:.2g}")
        keeps = yield setting
        if keeps:
            low = middle
        else:
            high = middle


def _calibrated(name: str, runs: int, measure: Callable[[str, float], Tried]) -> Calibrated:
    knob, low, high = settings(name)
    search: Any = bisected(low, high, runs, is_ratio=knob == "threshold")
    tried: dict[float, Tried] = {}
    setting = next(search)
    while True:
        if setting not in tried:
            written = f"{setting:g}" if knob == "threshold" else f"hits={setting:g}"
            tried[setting] = measure(f"{name}({written})", setting)
        seen = tried[setting]
        if seen.outcome in (Outcome.UNSUPPORTED, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY):
            return Calibrated(name, None, tuple(tried.values()), seen.reason)
        try:
            # One that never hit harms nothing; there must be more aggressive ones.
            setting = search.send(seen.keeps or seen.outcome == Outcome.NO_EFFECT)
        except StopIteration:
            break
    kept = [one for one in tried.values() if one.keeps]
    if not kept:
        return Calibrated(
            name, None, tuple(tried.values()), f"no setting from {min(tried):g} on keeps the gate"
        )
    return Calibrated(name, max(kept, key=lambda one: one.setting), tuple(tried.values()))


def _tried(row: Row, setting: float) -> Tried:
    record, judgement = row.record, row.judgement
    if record.outcome is not Outcome.MEASURED:
        return Tried(row.recipe, setting, False, record.outcome, record.reason)
    gate = Gate.UNCLEAR if judgement is None else judgement.gate
    rate = record.rounds[0].evidence.get("cache_hit_rate")
    return Tried(
        recipe=row.recipe,
        setting=setting,
        keeps=gate is Gate.PASSED,
        outcome=row.outcome,
        reason=None if judgement is None else f"{gate}: {judgement.reason}",
        hit_rate=None if rate is None else float(str(rate)),
        speedup=None if row.speedup is None else row.speedup.point,
    )
