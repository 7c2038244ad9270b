"""Judge a study's claims by a column of figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vivace.answers.formatting import seconds
from vivace.evidence.studies.claims import (
    Check,
    Claim,
    ClaimVerdict,
    JudgedClaim,
    decide,
    of_verdict,
    value_with_unit,
    within,
)
from vivace.evidence.studies.expand import ModelPart
from vivace.evidence.studies.study_columns import FIGURES, StudyCell, StudyColumn
from vivace.foundation.spec.environment import Place
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval, Spread, Verdict, learn_spread, log_speedup
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, LogMean
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.recipes.recipe import Recipe
from vivace.report.host import LEAST_CPU_SHARE, allowing_for, most_stretch, stretch_of
from vivace.report.machine_speed import moves_of
from vivace.report.rows import Row

_UNIT = {"time": 1.0, "memory": 1e9, "number": 1.0}
_SMALL_TIE = 1e-9


@dataclass(frozen=True)
class SpeedUp:
    """The speed-up of one row over another.

    Attributes:
        verdict: `unclear` where the measurement was disturbed.
        doubt: why the verdict is unclear, or needs a large difference; "" if only because of the interval.
        is_disturbed: whether other programs delayed one of the two, or a change of the CPU's speed between them may
            explain the difference because the GPU's waiting time is unknown.
        num_rounds: that both were measured in.
        times: seconds of the two over these rounds, whose quotient the ratio is; None if they share none.
        beside: where they share none, the times of a baseline and of the row measured beside it, for each of the two.
            The ratio is the quotient of both speed-ups.
    """

    ratio: Interval
    verdict: Verdict
    doubt: str = ""
    is_disturbed: bool = False
    num_rounds: int = 1
    times: tuple[float, float] | None = None
    beside: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def baseline_s(self) -> float | None:
        """The baseline's time, if `before` is a baseline that was measured beside `after`."""
        return self.times[0] if self.times is not None else None if self.beside is None else self.beside[1][0]


def judge(claim: Claim, parts: Sequence[ModelPart], columns: Sequence[StudyColumn]) -> list[JudgedClaim]:
    """Return each column's verdict on a claim; columns that it does not concern have none."""
    verdicts: list[JudgedClaim] = []
    unknown: list[JudgedClaim] = []
    for column in columns:
        if column.kind == "published" and claim.gpus and column.name not in claim.gpus:
            continue
        if claim.kind == "open":
            verdicts.append(JudgedClaim(column.name, column.kind, ClaimVerdict.CANNOT_TELL, claim.because))
            continue
        if claim.kind == "gpu":
            if column.name == claim.gpu:
                checks = list(_between_gpus(claim, parts, column, columns))
            elif column.kind == "measured":
                why = f"it is about {claim.gpu} and {claim.than}, and this is one device"
                verdicts.append(JudgedClaim(column.name, column.kind, ClaimVerdict.CANNOT_TELL, why))
                continue
            else:
                continue
        else:
            meant = _meant(claim, parts)
            if column.kind == "measured":  # another device has the other parts
                meant = [part for part in meant if any(key[:2] == _key(part) for key in column.cells)]
                if not meant:
                    continue
            checks = [check for part in meant for check in _checks(claim, part, column)]
        verdict_, because = decide(checks)
        verdict = JudgedClaim(column.name, column.kind, verdict_, because + _stand_ins(claim, parts, column))
        verdicts.append(verdict)
        if column.kind == "measured" and all(check.is_absent for check in checks):
            unknown.append(verdict)
    # A device without measurements for a claim does not count, unless no device has any.
    others = [verdict for verdict in verdicts if verdict.kind == "measured" and verdict not in unknown]
    return [verdict for verdict in verdicts if not others or verdict not in unknown]


def _stand_ins(claim: Claim, parts: Sequence[ModelPart], column: StudyColumn) -> str:
    """Return e.g. "; on tiny-sd" if small models replaced the study's."""
    if column.kind == "published":
        return ""
    names = dict.fromkeys(part.measured_on for part in _meant(claim, parts) if part.is_stand_in)
    return f"; on {', '.join(names)}" if names else ""


def time_of(part: ModelPart) -> str:
    """Return the part's time: the first of its figures that is a time."""
    return next((name for name in part.part.figures if FIGURES[name].kind == "time"), "latency")


def _meant(claim: Claim, parts: Sequence[ModelPart]) -> list[ModelPart]:
    return [
        part
        for part in parts
        if (not claim.part or part.part.name == claim.part)
        and (not claim.models or part.model in claim.models)
        and all(row in _labels(part) for row in (*claim.rows, *claim.among))
    ]


def _labels(part: ModelPart) -> list[str]:
    return [case.label for case in part.cases]


def _checks(claim: Claim, part: ModelPart, column: StudyColumn) -> Iterator[Check]:
    figure = claim.figure or time_of(part)
    if claim.kind == "best":
        yield from _best(claim, part, column, figure)
        return
    for row in claim.rows:
        if claim.kind == "limit":
            yield _limit(claim, part, column, row, figure)
        else:
            yield _pair(claim, part, column, row, figure)


def _pair(claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str) -> Check:
    """Compare a row with another."""
    here, there = (column.cell(part.part.name, part.model, name, figure) for name in (row, claim.than))
    kind = FIGURES[figure].kind
    if lacking := _lacking(part, ((row, here), (claim.than, there))):
        return lacking
    assert here.value is not None
    assert there.value is not None
    pair_text = (
        f"{row} {value_with_unit(here.value, kind)}, {claim.than} {value_with_unit(there.value, kind)}"
    )
    if column.kind == "measured":
        if untrusted := _untrusted(part, column, (row, claim.than), kind):
            return Check(part.model, None, f"{pair_text}: {untrusted}")
        if kind == "time":
            return _measured_pair(claim, part, column, row, pair_text)
        if kind == "number":
            return _measured_number(claim, part, column, row, figure, pair_text)
    share = here.value.point / there.value.point if there.value.point else float("inf")
    return Check(
        part.model, _holds(claim, Interval(1 / share if share else float("inf"), None, None)), pair_text
    )


def _holds(claim: Claim, speed: Interval) -> bool | None:
    """Return whether a speed-up confirms the claim, without regard to verdicts."""
    if claim.kind == "faster":
        return speed.point > 1 + _SMALL_TIE
    if claim.kind == "slower":
        return speed.point < 1 - _SMALL_TIE
    share = _inverse(speed)
    if claim.kind == "same":
        return within(share, 1 - claim.within, 1 + claim.within)
    return within(share, claim.at_least, claim.at_most)


def _measured_pair(claim: Claim, part: ModelPart, column: StudyColumn, row: str, pair_text: str) -> Check:
    before, after = (column.rows[(part.part.name, part.model, name)] for name in (claim.than, row))
    beside = [row for (name, model, _), row in column.rows.items() if (name, model) == _key(part)]
    measured = speed_up(before, after, column.baselines.get(_key(part), ()), spread_of(beside))
    if measured is None or measured.ratio.low is None or measured.ratio.high is None:
        return Check(part.model, None, f"{pair_text}: no interval")
    pair_text = _times(row, claim.than, measured) or pair_text
    pair_text += f", {measured.ratio.point:.2f}x [{measured.ratio.low:.2f}, {measured.ratio.high:.2f}]"
    if claim.kind in ("faster", "slower"):
        holds = of_verdict(claim.kind, measured.verdict)
    else:
        holds = None if measured.is_disturbed else _holds(claim, _with_drift(measured))
    return Check(
        part.model,
        holds,
        f"{pair_text} ({measured.doubt})" if holds is None and measured.doubt else pair_text,
    )


def _times(row: str, than: str, measured: SpeedUp) -> str:
    """Return the times of a ratio: those of the rounds that both rows share, or each beside its baseline."""
    if measured.times is not None:
        before, after = measured.times
        return f"{row} {seconds(after)}, {than} {seconds(before)}"
    if measured.beside is not None:
        (base_before, before), (base_after, after) = measured.beside
        return (
            f"{row} {seconds(after)} beside a baseline of {seconds(base_after)}, "
            f"{than} {seconds(before)} beside one of {seconds(base_before)}"
        )
    return ""


def _with_drift(measured: SpeedUp) -> Interval:
    """Return the interval, wider if one round cannot tell a slower machine from a slower recipe."""
    low, high = measured.ratio.low, measured.ratio.high
    if measured.num_rounds < 2 and low is not None and high is not None:
        return Interval(measured.ratio.point, low * (1 - ONE_ROUND_MARGIN), high * (1 + ONE_ROUND_MARGIN))
    return measured.ratio


def _measured_number(
    claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str, row_text: str
) -> Check:
    """Compare a figure of images with the baseline's, by the paired differences."""
    fidelity = column.rows[(*_key(part), row)].fidelity
    kept = None if fidelity is None else fidelity.alone.get(_ALONE[figure])
    if claim.than != part.cases[0].label or kept is None:
        return Check(part.model, None, f"{row_text}: images are compared with the baseline's only")
    if kept.difference.low is None or kept.difference.high is None:
        return Check(part.model, None, f"{row_text}: too few prompts for an interval")
    base = kept.mean - kept.difference.point
    if base <= 0:
        return Check(part.model, None, f"{row_text}: the baseline's is not positive")
    ends = [1 + end / base for end in (kept.difference.low, kept.difference.high)]
    share = Interval(kept.mean / base, *ends)
    if claim.kind == "same":
        return Check(part.model, within(share, 1 - claim.within, 1 + claim.within), row_text)
    return Check(part.model, within(share, claim.at_least, claim.at_most), row_text)


_ALONE = {
    "sharpness": "sharpness",
    "colourfulness": "colourfulness",
    "entropy": "entropy_bits",
    "clip": "clip_score",
}


def _inverse(ratio: Interval) -> Interval:
    low = None if ratio.high is None else 1 / ratio.high
    high = None if ratio.low is None else 1 / ratio.low
    return Interval(1 / ratio.point, low, high)


def _limit(claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str) -> Check:
    cell = column.cell(part.part.name, part.model, row, figure)
    if lacking := _lacking(part, ((row, cell),)):
        return lacking
    assert cell.value is not None
    kind = FIGURES[figure].kind
    row_text = f"{row} {value_with_unit(cell.value, kind)}"
    if column.kind == "measured" and part.is_stand_in:
        return Check(part.model, None, f"{row_text}: a small model in the place of {part.model}")
    if column.kind == "measured" and (untrusted := _untrusted(part, column, (row,), kind)):
        return Check(part.model, None, f"{row_text}: {untrusted}")
    unit = _UNIT[kind]
    ends = (None if end is None else end * unit for end in (claim.at_least, claim.at_most))
    return Check(part.model, within(cell.value, *ends), row_text)


def _best(claim: Claim, part: ModelPart, column: StudyColumn, figure: str) -> Iterator[Check]:
    """Compare the claim's first row with each other one."""
    best = claim.rows[0]
    for other in claim.among or _labels(part):
        if other != best:
            against = claim.model_copy(update={"kind": "faster", "rows": (best,), "than": other})
            yield _pair(against, part, column, best, figure)


def _between_gpus(
    claim: Claim, parts: Sequence[ModelPart], column: StudyColumn, columns: Sequence[StudyColumn]
) -> Iterator[Check]:
    other = next((column for column in columns if column.name == claim.than), None)
    for part in _meant(claim, parts):
        figure = claim.figure or time_of(part)
        for row in claim.rows or _labels(part):
            here = column.cell(part.part.name, part.model, row, figure)
            there = other.cell(part.part.name, part.model, row, figure) if other else StudyCell("absent")
            if here.value is None or there.value is None:
                yield Check(part.model, None, f"{row} is not known on both", is_absent=True)
                continue
            kind = FIGURES[figure].kind
            ratio = there.value.point / here.value.point
            pair_text = f"{row} {value_with_unit(here.value, kind)} and {value_with_unit(there.value, kind)}"
            lower = claim.at_least if claim.at_least is not None else 1 + _SMALL_TIE
            yield Check(
                part.model,
                within(Interval(ratio, None, None), lower, claim.at_most),
                f"{pair_text}, {ratio:.2f}x",
            )


def _lacking(part: ModelPart, cells: Sequence[tuple[str, StudyCell]]) -> Check | None:
    """Return the check of a comparison that lacks a number, with the reason."""
    for row, cell in cells:
        if cell.value is None:
            why = cell.outcome.replace("_", " ") if cell.outcome not in ("absent", "measured") else ""
            text = ": ".join(text for text in (why, cell.note) if text) or "has no number"
            return Check(part.model, None, f"{row} {text}", is_absent=True)
    return None


def _untrusted(part: ModelPart, column: StudyColumn, names: Sequence[str], kind: str) -> str:
    """Return the reason why measured figures cannot decide the claim; "" if they can."""
    rows = [column.rows[(*_key(part), name)] for name in names]
    if kind == "memory" and any(row.memory is not None and row.memory.kind != _DEVICE for row in rows):
        return "on a CPU it is the process's resident set, libraries included"
    if kind == "time" and any(_decides_on_values(row) for row in rows):
        return "with random weights a cache's threshold decides on noise"
    is_set = any(case.stands_for for case in part.cases if case.label in names)
    if kind == "time" and is_set and (len(rows) == 1 or len({_schedules(row) for row in rows}) > 1):
        return "with random weights the number of skipped steps is set, and with it the outcome"
    return ""


def _schedules(row: Row) -> tuple[float | None, ...]:
    """Return the share of the steps that each step cache of a row skips."""
    return tuple(t.hits for t in Recipe.from_spec(row.record.trial.recipe) if isinstance(t, StepCache))


_DEVICE = "device memory allocated"


def _decides_on_values(row: Row) -> bool:
    if not row.record.trial.model.is_synthetic:
        return False
    caches = [t for t in Recipe.from_spec(row.record.trial.recipe) if isinstance(t, StepCache)]
    return any(not cache.is_fixed and cache.compared for cache in caches)


def _key(part: ModelPart) -> tuple[str, str]:
    return part.part.name, part.model


def speed_up(
    before: Row, after: Row, baselines: Sequence[Row] = (), spread: Spread = DEFAULT_SPREAD
) -> SpeedUp | None:
    """Return the speed-up of `after` over `before`; None if the two have no baseline in common.

    Rows that were measured in the same rounds of one GPU are compared directly. Others, e.g. of a resumed study or of
    several GPUs, are compared through their baselines, which were measured beside them.

    Args:
        baselines: the baseline's rows, one for each GPU or host, or for each set of sittings.
    """
    old, new = before.steady_s, after.steady_s
    shared = sorted(set(old) & set(new)) if _place(before) == _place(after) else []
    times, beside = None, None
    if shared:
        mean = log_speedup([old[i] for i in shared], [new[i] for i in shared], spread)
        num_rounds = len(shared)
        times = _typical(old, shared), _typical(new, shared)
    else:
        ways = [_beside(baselines, row, spread) for row in (before, after)]
        if ways[0] is None or ways[1] is None:
            return None
        (to_old, rounds_old, times_old), (to_new, rounds_new, times_new) = ways[0], ways[1]
        mean = _difference(to_new, to_old)
        num_rounds = min(rounds_old, rounds_new)
        beside = times_old, times_new
    drift = _cpu_ratio(before, after)
    stretch = (
        1.0 if after.latency is None else stretch_of(after.latency.median.point, after.gpu_busy_s, drift)
    )
    held_up = any(row.cpu_share is not None and row.cpu_share < LEAST_CPU_SHARE for row in (before, after))
    if held_up:
        doubt = "another program kept the CPU busy"
        return SpeedUp(mean.interval(), Verdict.UNCLEAR, doubt, True, num_rounds, times, beside)
    ratio, verdict_ = allowing_for(
        most_stretch(drift or 1.0) if stretch is None else stretch, mean, num_rounds
    )
    if stretch is None and verdict_ is Verdict.UNCLEAR:
        return SpeedUp(ratio, verdict_, _told(drift), True, num_rounds, times, beside)
    doubts = ["one round only"] if num_rounds < 2 else []
    if stretch != 1.0:
        doubts.append(f"{_told(drift)}, which the interval allows for")
    return SpeedUp(ratio, verdict_, "; ".join(doubts), num_rounds=num_rounds, times=times, beside=beside)


def _beside(
    baselines: Sequence[Row], row: Row, spread: Spread
) -> tuple[LogMean, int, tuple[float, float]] | None:
    """Return the speed-up over the baseline of the same place, the number of its rounds, and both times."""
    new = row.steady_s
    for baseline in baselines:
        old = baseline.steady_s
        shared = sorted(set(old) & set(new)) if _place(baseline) == _place(row) else []
        if shared:
            ratio = log_speedup([old[i] for i in shared], [new[i] for i in shared], spread)
            return ratio, len(shared), (_typical(old, shared), _typical(new, shared))
    return None


def _typical(samples: Mapping[int, Sequence[float]], rounds: Sequence[int]) -> float:
    """Return the geometric mean of the rounds' medians: the quotient of two is the speed-up over these rounds."""
    return math.exp(statistics.fmean(math.log(statistics.median(samples[i])) for i in rounds))


def _difference(mean: LogMean, other: LogMean) -> LogMean:
    """Return the difference of two independent means."""
    error = None if mean.error is None or other.error is None else math.hypot(mean.error, other.error)
    return LogMean(mean.mean - other.mean, error, min(mean.dof, other.dof))


def spread_of(rows: Iterable[Row]) -> Spread:
    """Return the spread between processes, estimated from rows that were measured beside each other."""
    spread = DEFAULT_SPREAD
    by_place: dict[Place | None, list[Row]] = {}
    for row in rows:
        if row.steady_s:
            by_place.setdefault(_place(row), []).append(row)
    for group in by_place.values():
        spread = learn_spread([r.steady_s for r in group], spread, moves_of([r.record for r in group]))
    return spread


def _place(row: Row) -> Place | None:
    return row.record.environment.place


def _cpu_ratio(before: Row, after: Row) -> float | None:
    """Return the time of a fixed Python loop beside `after` over that beside `before`; None if unknown."""
    return after.cpu_ratio / before.cpu_ratio if after.cpu_ratio and before.cpu_ratio else None


def _told(ratio: float | None) -> str:
    change = math.exp(abs(math.log(ratio))) if ratio else 1.0
    return f"the CPU's speed changed by {change:.1f} times between the two"
