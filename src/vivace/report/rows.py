"""Turn Records into rows. Every statistic is computed here, when the records are read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vivace.foundation.spec.figures import ImageFigures, NoiseFloor, QualityPass
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.spec.record import CAPTURED_WHILE_TIMED, HIDDEN, Memory, Outcome, Record
from vivace.foundation.stats import (
    ONE_ROUND_MARGIN,
    Gate,
    Interval,
    LogMean,
    Spread,
    Verdict,
    learn_spread,
    log_speedup,
)
from vivace.report.device_limit import GpuUse, Limit, cost_per_1000, gpu_use, limit_of
from vivace.report.fidelity import Fidelity, fidelity, paired_figures
from vivace.report.host import (
    LEAST_CPU_SHARE,
    SecondsByRound,
    allowing_for,
    cpu_ratio,
    cpu_share,
    has_changed,
    most_stretch,
    moves_of,
    steady_seconds,
    stretch_of,
)
from vivace.report.latency import Latency, ends_of, latency_of
from vivace.report.quality_gate import Judgement, judge

RANDOM_WEIGHTS = "random weights: times and memory are the architecture's; image quality cannot be judged"
ONE_ROUND = f"one round only: differences under {100 * ONE_ROUND_MARGIN:.0f} % cannot be told from drift"

UNSTEADY = "the warm-up ended before the times were steady"


@dataclass(frozen=True)
class Compilation:
    """Compile time: how many seconds longer the first call was than the median call of the same process.

    fresh_s: in the first process that had to compile; None if all processes loaded their code from the disk cache.
    cached_s: in the first process that loaded all code from the disk cache; None if none did.
    break_even_images: number of images from which a fresh start takes less time than the baseline; None if no gain
        over the baseline was shown.
    """

    fresh_s: float | None
    cached_s: float | None
    break_even_images: int | None

    @property
    def seconds(self) -> float:
        seconds = self.fresh_s if self.fresh_s is not None else self.cached_s
        assert seconds is not None
        return seconds


@dataclass(frozen=True)
class Row:
    """The results of one trial. Figures are None unless the outcome is `measured`.

    `speedup` compares with the baseline row (the first); None for the baseline itself. `stages_s` are medians, in
    seconds per image.
    """

    record: Record
    is_baseline: bool
    latency: Latency | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    num_denoiser_calls: int | None = None
    first_call_s: float | None = None
    load_s: float | None = None
    memory: Memory | None = None
    speedup: Interval | None = None
    verdict: Verdict | None = None
    fidelity: Fidelity | None = None
    """None without a quality pass."""
    judgement: Judgement | None = None
    """The quality gate's verdict; None without a quality pass, and for a baseline without broken images."""
    noise_floor: Fidelity | None = None
    """How close the baseline's images are to themselves under a harmless change; only in the baseline's row."""
    floor: NoiseFloor | None = None
    figures: tuple[ImageFigures, ...] = ()
    limits: Limits = DEFAULT_LIMITS
    compilation: Compilation | None = None
    """None if nothing was compiled."""
    gpu_busy_s: float | None = None
    """Seconds per image in which the GPU is busy; None on a CPU. The rest of the time it waits for the CPU."""
    limit: Limit | None = None
    """Distance from the device's limit; None without measured ceilings."""
    gpu: GpuUse | None = None
    """Energy, clocks and temperature over the timed calls; None on a CPU."""
    price_per_hour: float | None = None
    """Price of an hour of the machine, if the user gave one."""
    cpu_share: float | None = None
    """Share of its threads' time that the process got, in its worst round; None on a GPU, or if unknown."""
    cpu_ratio: float | None = None
    """Time of a fixed Python loop while this row was measured over its time during the baseline; None if unknown."""
    cpu_stretch: float | None = 1.0
    """Factor of the speed-up for a CPU as fast as the baseline's; None if unknown."""
    steady_s: SecondsByRound = field(default_factory=dict)
    """What speed-ups are computed from (see `vivace.report.host`); empty unless measured."""

    @property
    def model(self) -> str:
        return self.record.trial.model.name

    @property
    def name(self) -> str:
        """The recipe as tables show it (see `vivace.foundation.spec.recipe_syntax.short_form`)."""
        trial = self.record.trial
        return short_form(trial.recipe.text) + trial.title.removeprefix(trial.recipe.text)

    @property
    def recipe(self) -> str:
        return self.record.trial.title

    @property
    def outcome(self) -> Outcome:
        """The stored outcome; `failed_quality` for a measured row whose images fail the current limits."""
        return Outcome.FAILED_QUALITY if self.failed_quality else self.record.outcome

    @property
    def reason(self) -> str | None:
        """Why the trial was not measured, or why its quality failed."""
        return self.judgement.reason if self.failed_quality and self.judgement else self.record.reason

    @property
    def failed_quality(self) -> bool:
        return (
            self.record.outcome is Outcome.MEASURED
            and self.judgement is not None
            and self.judgement.gate is Gate.FAILED
        )

    @property
    def cpu_differs(self) -> bool:
        return has_changed(self.cpu_ratio)

    @property
    def is_disturbed(self) -> bool:
        """Whether its time cannot be compared: other programs held it up, or the CPU's speed changed too much.

        Where it is known how long the GPU waited for the CPU, the speed-up's interval allows for the change.
        """
        return self.cpu_stretch is None or (self.cpu_share is not None and self.cpu_share < LEAST_CPU_SHARE)

    @property
    def largest_delay(self) -> float:
        """How many times its own seconds it may have taken: by the CPU's time that others got, and its speed."""
        share = 1.0 if self.cpu_share is None else min(1.0, self.cpu_share)
        changed = 1.0
        if self.cpu_stretch is None and self.cpu_ratio is not None:
            changed = most_stretch(max(self.cpu_ratio, 1 / self.cpu_ratio))
        return changed / max(share, 1e-3)

    @property
    def cpu_drift(self) -> str | None:
        """ "1.5 times as slowly", if the CPU's speed changed since the baseline."""
        if self.cpu_ratio is None or not self.cpu_differs:
            return None
        return f"{max(self.cpu_ratio, 1 / self.cpu_ratio):.1f} times as {'slowly' if self.cpu_ratio > 1 else 'fast'}"

    @property
    def cost_per_1000(self) -> float | None:
        """The cost of 1,000 images, in the currency of the price; None without a price."""
        if self.price_per_hour is None or self.latency is None:
            return None
        return cost_per_1000(self.latency.median.point, self.price_per_hour)

    @property
    def step_s(self) -> float | None:
        """Seconds per image of one denoiser call."""
        return self.stages_s["steps"] / self.num_denoiser_calls if self.num_denoiser_calls else None

    @property
    def effects(self) -> dict[str, dict[str, int | float | str]]:
        return self.record.rounds[0].effects

    @property
    def warnings(self) -> tuple[str, ...]:
        warnings = list(self.record.rounds[0].warnings)
        if self.record.trial.model.is_synthetic:
            warnings.insert(0, RANDOM_WEIGHTS)
        if len(self.record.rounds) == 1 and self.record.outcome is Outcome.MEASURED:
            warnings.append(ONE_ROUND)
        if any(r.steady is False and r.outcome is Outcome.MEASURED for r in self.record.rounds):
            warnings.append(UNSTEADY)
        evidence: list[dict[str, Any]] = [r.evidence for r in self.record.rounds]
        if graphs := max(found_in.get(CAPTURED_WHILE_TIMED, 0) for found_in in evidence):
            warnings.append(
                f"{graphs} CUDA graph{'' if graphs == 1 else 's'} captured during the timed calls, which made them "
                "longer: each new shape needs one, such as that of a prompt of another length"
            )
        images = self.record.rounds[0].pictures
        for fault, problem in (
            (HIDDEN, "the model's safety checker replaced {} by black ones, which say nothing of quality"),
            ("black", "{} are black"),
            ("flat", "{} have one colour"),
        ):
            empty = [image for image in images if fault in image.faults[-1:]]
            if empty:
                which = ", ".join(f"{image.prompt!r} with seed {image.seed}" for image in empty[:3])
                count = problem.format(f"{len(empty)} of {len(images)} images")
                warnings.append(f"{count}: {which}{', ...' if len(empty) > 3 else ''}")
        if self.limit is not None and self.limit.problem is not None:
            warnings.append(self.limit.problem)
        if self.gpu is not None and self.gpu.slowed_down is not None:
            warnings.append(f"the GPU's clocks were held down: {self.gpu.slowed_down}")
        if self.cpu_share is not None and self.cpu_share < LEAST_CPU_SHARE:
            warnings.append(
                f"another program kept the CPU busy: this process got {self.cpu_share:.0%} of its threads' time"
            )
        if self.latency is not None and (drift := self.cpu_drift) is not None:
            warnings.append(
                f"the CPU ran Python {drift} as while the baseline was measured: {self._cpu_comparable}"
            )
        return tuple(warnings)

    @property
    def _cpu_comparable(self) -> str:
        if self.cpu_stretch is None or self.gpu_busy_s is None or self.latency is None:
            return "CPU-bound times are not comparable"
        busy = min(1.0, self.gpu_busy_s / self.latency.median.point)
        return f"the interval allows for it, since the GPU was busy {busy:.0%} of the time"

    def describe_skipping(self, baseline: Row) -> tuple[str, ...]:
        """Return what the row leaves out of the baseline's steps, in words."""
        hits = float(str(self.record.rounds[0].evidence.get("cache_hit_rate", 0.0))) if self.latency else 0.0
        words = [f"skips {hits:.0%} of its steps, or parts of them"] if hits else []
        mine, all_calls = self.num_denoiser_calls, baseline.num_denoiser_calls
        if mine and all_calls and mine < all_calls:
            words.append(f"calls the denoiser {mine} times instead of {all_calls}")
        return tuple(words)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data: the object that `vivace bench --format json` prints for a trial."""
        record = self.record
        return {
            "model": self.model,
            "source": record.trial.model.source,
            "recipe": self.recipe,
            "is_baseline": self.is_baseline,
            "same_picture": record.trial.recipe.same_picture,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "batch": record.trial.workload.batch,
            "latency": None if self.latency is None else self.latency.to_json(),
            "images_per_s": None if self.latency is None else 1 / self.latency.median.point,
            "stages": self.stages_s or None,
            "gpu_busy_s": self.gpu_busy_s,
            "limit": None if self.limit is None else asdict(self.limit),
            "gpu": None if self.gpu is None else asdict(self.gpu) | {"throttled": list(self.gpu.throttled)},
            "price_per_hour": self.price_per_hour,
            "cost_per_1000": self.cost_per_1000,
            "num_denoiser_calls": self.num_denoiser_calls,
            "first_call_s": self.first_call_s,
            "load_s": self.load_s,
            "compilation": None if self.compilation is None else asdict(self.compilation),
            "memory": None if self.memory is None else self.memory.model_dump(mode="json"),
            "speedup": None
            if self.speedup is None
            else {"ratio": self.speedup.point, "ci95": ends_of(self.speedup), "verdict": self.verdict},
            "quality": self._quality_json(),
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
            "effects": self.effects,
            "evidence": record.rounds[0].evidence,
            "warnings": list(self.warnings),
            "rounds": len(record.rounds),
            "workload": record.trial.workload.model_dump(mode="json"),
            "pictures": [p.model_dump(mode="json") for p in record.rounds[0].pictures],
            "figures": [f.model_dump(mode="json") for f in self.figures],
            "environment": record.environment.model_dump(mode="json"),
        }

    def _quality_json(self) -> dict[str, Any] | None:
        if self.judgement is None and self.fidelity is None:
            return None
        fields: dict[str, Any] = {
            "verdict": None if self.judgement is None else self.judgement.gate.value,
            "reason": None if self.judgement is None else self.judgement.reason,
            "limits": self.limits.model_dump(mode="json"),
        }
        if self.floor is not None:
            fields["noise_floor"] = {
                "recipe": self.floor.recipe,
                "reason": self.floor.reason,
                "fidelity": None if self.noise_floor is None else self.noise_floor.to_json(),
            }
        return fields


NO_QUALITY = QualityPass()


def rows_of(
    records: Sequence[Record], quality: QualityPass = NO_QUALITY, limits: Limits = DEFAULT_LIMITS
) -> list[Row]:
    """Return one row per record, in order. The first record is the baseline that the others are compared with."""
    limits = limits.for_scorer(quality.scorer)
    steady, spread = _steady(records)
    rows = [
        _row(record, seconds, records[0], steady[0], spread, is_baseline=i == 0)
        for i, (record, seconds) in enumerate(zip(records, steady, strict=True))
    ]
    rows = [_with_compilation(row, rows[0]) for row in rows]
    rows = [_unclear_if_disturbed(row, rows[0]) for row in rows]
    return [_judged(row, records[0], quality, limits) for row in rows]


def log_speedups(records: Sequence[Record]) -> list[tuple[Record, LogMean | None, int]]:
    """Return each recipe's record, the logarithm of its speed-up (None if unmeasured) and the number of its rounds."""
    if not records:
        return []
    (baseline, *others), spread = _steady(records)
    return [
        (record, _log_speedup(baseline, own, spread), len(set(baseline) & set(own)))
        for record, own in zip(records[1:], others, strict=True)
    ]


def _steady(records: Sequence[Record]) -> tuple[list[SecondsByRound], Spread]:
    """Return each record's seconds at one speed of the machine, and how much processes differ."""
    steady = steady_seconds(records)
    return steady, learn_spread([seconds for seconds in steady if seconds], moves=moves_of(records))


def _log_speedup(baseline: SecondsByRound, other: SecondsByRound, spread: Spread) -> LogMean | None:
    shared = sorted(set(baseline) & set(other))
    return log_speedup([baseline[i] for i in shared], [other[i] for i in shared], spread) if shared else None


def priced(rows: Sequence[Row], price_per_hour: float | None) -> list[Row]:
    return [replace(row, price_per_hour=price_per_hour) for row in rows]


def _unclear_if_disturbed(row: Row, baseline: Row) -> Row:
    """Replace the verdict by "unclear" if other programs delayed the row's process or the baseline's, or the CPU's
    speed changed, and that may be all that the speed-up is."""
    if row.verdict is None or not (row.is_disturbed or baseline.is_disturbed):
        return row
    most = (1 + ONE_ROUND_MARGIN) * row.largest_delay * baseline.largest_delay
    low, high = (None, None) if row.speedup is None else (row.speedup.low, row.speedup.high)
    is_beyond = (low is not None and low > most) or (high is not None and high < 1 / most)
    return row if is_beyond else replace(row, verdict=Verdict.UNCLEAR)


def _gpu_busy_s(record: Record) -> float | None:
    busy_s = [r.gpu_busy_s for r in record.rounds if r.gpu_busy_s is not None]
    return statistics.median(busy_s) / record.trial.workload.batch if busy_s else None


def _with_compilation(row: Row, baseline: Row) -> Row:
    if row.latency is None:
        return row
    gain = None
    if baseline.latency is not None and row.verdict is Verdict.FASTER:
        gain = baseline.latency.median.point - row.latency.median.point
    return replace(row, compilation=compilation(row.record, gain))


def _judged(row: Row, baseline: Record, quality: QualityPass, limits: Limits) -> Row:
    pairs = paired_figures(row.record.rounds[0].pictures, baseline, quality)
    floor = quality.floor
    reached = fidelity(paired_figures(floor.pictures, baseline, quality)) if floor is not None else None
    compared = fidelity(pairs)
    judgement = judge(row.record, baseline, None if row.is_baseline else compared, reached, limits)
    return replace(
        row,
        figures=pairs.figures,
        fidelity=compared,
        judgement=judgement,
        limits=limits,
        noise_floor=reached if row.is_baseline else None,
        floor=floor if row.is_baseline else None,
    )


def shared_warnings(rows: Sequence[Row]) -> list[str]:
    """Return the warnings that every measured row has; reports print them once, below the table."""
    measured = [row for row in rows if row.latency is not None]
    if len(measured) < 2:
        return []
    return [w for w in measured[0].warnings if all(w in row.warnings for row in measured)]


def _row(
    record: Record,
    steady: SecondsByRound,
    beside: Record,
    baseline: SecondsByRound,
    spread: Spread,
    *,
    is_baseline: bool,
) -> Row:
    if not steady:
        return Row(record, is_baseline)
    ratio = None if is_baseline else _log_speedup(baseline, steady, spread)
    timed = [s for r in record.rounds for s in r.samples]
    batch = record.trial.workload.batch
    seconds = tuple(tuple(s.total_s / batch for s in r.samples) for r in record.rounds if r.samples)
    latency, busy_s = latency_of(seconds, spread), _gpu_busy_s(record)
    changed = cpu_ratio(record, beside)
    stretch = stretch_of(latency.median.point, busy_s, changed)
    gain = None if ratio is None else allowing_for(stretch or 1.0, ratio, len(set(baseline) & set(steady)))
    return Row(
        record=record,
        steady_s=steady,
        is_baseline=is_baseline,
        latency=latency,
        stages_s={k: statistics.median(s.stages_s[k] / batch for s in timed) for k in timed[0].stages_s},
        num_denoiser_calls=round(statistics.median(s.num_denoiser_calls for s in timed)),
        first_call_s=record.rounds[0].first_call_s,
        load_s=record.rounds[0].load_s,
        # What a GPU must provide.
        memory=max((r.memory for r in record.rounds if r.memory), key=lambda m: m.peak_bytes, default=None),
        gpu_busy_s=busy_s,
        gpu=gpu_use(record),
        limit=limit_of(record, latency.median.point, busy_s),
        cpu_share=cpu_share(record),
        cpu_ratio=changed,
        cpu_stretch=stretch,
        speedup=None if gain is None else gain[0],
        verdict=None if gain is None else gain[1],
    )


def compilation(record: Record, gain_s: float | None) -> Compilation | None:
    """Return the compilation cost of a measured record; None if nothing was compiled."""
    fresh: list[float | None] = []
    cached: list[float | None] = []
    for round_ in record.rounds:
        number = {name: value for name, value in round_.evidence.items() if isinstance(value, int | float)}
        if number.get("compiled_graphs", 0) >= 1 and round_.first_call_s is not None:
            is_cached = number.get("graphs_from_cache", 0) and not number.get("graphs_not_in_cache", 0)
            usual = [sample.total_s for sample in round_.samples]
            longer = max(0.0, round_.first_call_s - statistics.median(usual)) if usual else None
            (cached if is_cached else fresh).append(longer)
    fresh_s, cached_s = (next((s for s in of if s is not None), None) for of in (fresh, cached))
    spent = fresh_s if fresh_s is not None else cached_s
    if spent is None:
        return None
    images = max(1, math.ceil(spent / gain_s)) if gain_s is not None and gain_s > 0 else None
    return Compilation(fresh_s, cached_s, images)
