"""Judge a study's claims by a column of figures.

A published number has no interval: it is compared as it is printed. Measured times are compared with their intervals,
so a statement that they do not settle stays undecided.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from vivace.answers.formatting import seconds, size
from vivace.evidence.studies.expand import ModelPart
from vivace.evidence.studies.study_columns import FIGURES, StudyCell, StudyColumn
from vivace.evidence.studies.study_file import Claim
from vivace.foundation.spec.environment import Place
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval, Spread, Verdict, learn_spread, log_speedup
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, LogMean
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.recipes.recipe import Recipe
from vivace.report.host import LEAST_CPU_SHARE, allowing_for, most_stretch, moves_of, stretch_of
from vivace.report.rows import Row

_MAX_SHOWN = 3
_SMALL_TIE = 1e-9
_DEVICE = "device memory allocated"


class ClaimVerdict(StrEnum):
    AGREES = "agrees"
    DISAGREES = "does not"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class JudgedClaim:
    """A claim judged by one column."""

    column: str
    kind: Literal["published", "measured"]
    verdict: ClaimVerdict
    because: str


@dataclass(frozen=True)
class Check:
    """One comparison of a claim on a model: whether it holds (None: undecided), and the numbers."""

    model: str
    holds: bool | None
    text: str
    is_absent: bool = False


def decide(checks: Sequence[Check]) -> tuple[ClaimVerdict, str]:
    """Return the verdict of several comparisons: all must hold. Those without numbers are counted, not judged."""
    if len({check.model for check in checks}) > 1:
        checks = [replace(check, text=f"{check.model}: {check.text}") for check in checks]
    present = [check for check in checks if not check.is_absent]
    failed = [check for check in present if check.holds is False]
    unclear = [check for check in present if check.holds is None]
    if failed:
        num_held = len(present) - len(failed) - len(unclear)
        held = f"holds in {num_held} of {len(present)}; " if len(present) > 1 else ""
        return ClaimVerdict.DISAGREES, held + _joined(failed)
    if unclear or not present:
        return ClaimVerdict.CANNOT_TELL, _joined(unclear or checks) or "no row of it was measured"
    lacking = len(checks) - len(present)
    tail = f" ({lacking} of {len(checks)} not known)" if lacking else ""
    return ClaimVerdict.AGREES, _joined(present) + tail


def tally(claims: Sequence[tuple[Claim, Sequence[JudgedClaim]]]) -> list[tuple[str, str]]:
    """Return each column's verdicts on all claims, e.g. ("A100", "agrees 8, does not 1, cannot tell 1")."""
    counts: dict[tuple[bool, str], Counter[ClaimVerdict]] = {}
    for _, verdicts in claims:
        for verdict in verdicts:
            counts.setdefault((verdict.kind == "measured", verdict.column), Counter())[verdict.verdict] += 1
    return [
        (
            f"here, {column}" if is_measured else column,
            ", ".join(f"{verdict.value} {count[verdict]}" for verdict in ClaimVerdict if count[verdict]),
        )
        for (is_measured, column), count in sorted(counts.items(), key=lambda item: item[0][0])
    ]


def _joined(checks: Sequence[Check]) -> str:
    texts = list(dict.fromkeys(check.text for check in checks))
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return "; ".join(texts[:_MAX_SHOWN]) + more


def within(ratio: Interval, at_least: float | None, at_most: float | None) -> bool | None:
    """Return whether a value lies between two limits; None if its interval cannot tell."""
    low = ratio.point if ratio.low is None else ratio.low
    high = ratio.point if ratio.high is None else ratio.high
    if (at_least is not None and high < at_least) or (at_most is not None and low > at_most):
        return False
    if (at_least is not None and low < at_least) or (at_most is not None and high > at_most):
        return None
    return True


def of_verdict(kind: str, verdict: Verdict) -> bool | None:
    """Return whether a verdict on a speed-up confirms "faster" or "slower"; None if it is unclear."""
    if verdict is Verdict.UNCLEAR:
        return None
    return verdict is (Verdict.FASTER if kind == "faster" else Verdict.SLOWER)


def value_with_unit(value: Interval, kind: str) -> str:
    """Return a figure with its unit, e.g. "1.30 s", "16.9 GB", "0.2729"."""
    if kind == "time":
        return seconds(value.point)
    if kind == "memory":
        return size(value.point)
    return f"{value.point:.4f}" if abs(value.point) < 1 else f"{value.point:.4g}"


@dataclass(frozen=True)
class SpeedUp:
    """The speed-up of one row over another.

    Attributes:
        doubt: why the verdict is unclear, or needs a large difference; "" if only because of the interval.
        is_disturbed: whether other programs delayed one of the two, or a change of the CPU's speed between them may
            explain the difference because the GPU's waiting time is unknown.
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
    meant = _meant(claim, parts)
    for column in columns:
        is_measured, is_of_gpus = column.kind == "measured", claim.kind == "gpu"
        other_gpus = (claim.gpu,) if is_of_gpus else claim.gpus
        if not is_measured and other_gpus and column.name not in other_gpus:
            continue
        checks: list[Check] = []
        if claim.kind == "open":
            verdict, because = ClaimVerdict.CANNOT_TELL, claim.because
        elif is_of_gpus and column.name != claim.gpu:
            verdict = ClaimVerdict.CANNOT_TELL
            because = f"it is about {claim.gpu} and {claim.than}, and this is one device"
        else:
            # Another device has the other parts.
            here = [p for p in meant if not is_measured or any(key[:2] == _key(p) for key in column.cells)]
            if is_measured and not here:
                continue
            checks = [check for part in here for check in _checks(claim, part, column)]
            if is_of_gpus:
                checks = list(_between_gpus(claim, meant, column, columns))
            verdict, because = decide(checks)
            stand_ins = dict.fromkeys(part.measured_on for part in meant if part.is_stand_in)
            because += f"; on {', '.join(stand_ins)}" if is_measured and stand_ins else ""
        verdicts.append(JudgedClaim(column.name, column.kind, verdict, because))
        if is_measured and checks and all(check.is_absent for check in checks):
            unknown.append(verdicts[-1])
    # A device without measurements for a claim does not count, unless no device has any.
    others = [verdict for verdict in verdicts if verdict.kind == "measured" and verdict not in unknown]
    return [verdict for verdict in verdicts if not others or verdict not in unknown]


def time_of(part: ModelPart) -> str:
    """Return the part's time: the first of its figures that is a time."""
    return next((name for name in part.part.figures if FIGURES[name].kind == "time"), "latency")


def _meant(claim: Claim, parts: Sequence[ModelPart]) -> list[ModelPart]:
    return [
        part
        for part in parts
        if claim.part in ("", part.part.name)
        and (not claim.models or part.model in claim.models)
        and {*claim.rows, *claim.among} <= set(_labels(part))
    ]


def _labels(part: ModelPart) -> list[str]:
    return [case.label for case in part.cases]


def _key(part: ModelPart) -> tuple[str, str]:
    return part.part.name, part.model


def _checks(claim: Claim, part: ModelPart, column: StudyColumn) -> Iterator[Check]:
    figure = claim.figure or time_of(part)
    if claim.kind == "best":  # the first row against each other one
        best = claim.rows[0]
        for other in claim.among or _labels(part):
            if other != best:
                against = claim.model_copy(update={"kind": "faster", "rows": (best,), "than": other})
                yield _pair(against, part, column, best, figure)
        return
    for row in claim.rows:
        yield (_limit if claim.kind == "limit" else _pair)(claim, part, column, row, figure)


def _pair(claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str) -> Check:
    here, there = (column.cell(*_key(part), name, figure) for name in (row, claim.than))
    kind = FIGURES[figure].kind
    lacking = _lacking(part, row, here) or _lacking(part, claim.than, there)
    if lacking is not None or here.value is None or there.value is None:
        return lacking or Check(part.model, None, row, is_absent=True)
    text = f"{row} {value_with_unit(here.value, kind)}, {claim.than} {value_with_unit(there.value, kind)}"
    if column.kind == "measured":
        if untrusted := _untrusted(part, column, (row, claim.than), kind):
            return Check(part.model, None, f"{text}: {untrusted}")
        if kind == "time":
            return _measured_pair(claim, part, column, row, text)
        if kind == "number":
            return _measured_number(claim, part, column, row, figure, text)
    share = here.value.point / there.value.point if there.value.point else math.inf
    return Check(part.model, _holds(claim, Interval(share, None, None)), text)


def _holds(claim: Claim, share: Interval) -> bool | None:
    """Return whether a row's share of another's time confirms the claim, without regard to verdicts."""
    if claim.kind == "faster":
        return share.point * (1 + _SMALL_TIE) < 1
    if claim.kind == "slower":
        return share.point * (1 - _SMALL_TIE) > 1
    if claim.kind == "same":
        return within(share, 1 - claim.within, 1 + claim.within)
    return within(share, claim.at_least, claim.at_most)


def _measured_pair(claim: Claim, part: ModelPart, column: StudyColumn, row: str, text: str) -> Check:
    before, after = (column.rows[(*_key(part), name)] for name in (claim.than, row))
    beside = [row for key, row in column.rows.items() if key[:2] == _key(part)]
    measured = speed_up(before, after, column.baselines.get(_key(part), ()), spread_of(beside))
    if measured is None or measured.ratio.low is None or measured.ratio.high is None:
        return Check(part.model, None, f"{text}: no interval")
    if measured.times is not None:
        text = f"{row} {seconds(measured.times[1])}, {claim.than} {seconds(measured.times[0])}"
    elif measured.beside is not None:
        (base_before, of_before), (base_after, of_after) = measured.beside
        text = (
            f"{row} {seconds(of_after)} beside a baseline of {seconds(base_after)}, "
            f"{claim.than} {seconds(of_before)} beside one of {seconds(base_before)}"
        )
    text += f", {measured.ratio.point:.2f}x [{measured.ratio.low:.2f}, {measured.ratio.high:.2f}]"
    if claim.kind in ("faster", "slower"):
        holds = of_verdict(claim.kind, measured.verdict)
    else:
        ratio = _with_drift(measured)
        ends = (None if end is None else 1 / end for end in (ratio.high, ratio.low))
        holds = None if measured.is_disturbed else _holds(claim, Interval(1 / ratio.point, *ends))
    doubt = f" ({measured.doubt})" if holds is None and measured.doubt else ""
    return Check(part.model, holds, text + doubt)


def _with_drift(measured: SpeedUp) -> Interval:
    """Return the interval, wider if one round cannot tell a slower machine from a slower recipe."""
    low, high = measured.ratio.low, measured.ratio.high
    if measured.num_rounds < 2 and low is not None and high is not None:
        return Interval(measured.ratio.point, low * (1 - ONE_ROUND_MARGIN), high * (1 + ONE_ROUND_MARGIN))
    return measured.ratio


def _measured_number(
    claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str, text: str
) -> Check:
    """Compare a figure of images with the baseline's, by the paired differences."""
    fidelity = column.rows[(*_key(part), row)].fidelity
    stored = {"entropy": "entropy_bits", "clip": "clip_score"}.get(figure, figure)
    kept = None if fidelity is None else fidelity.alone.get(stored)
    if claim.than != part.cases[0].label or kept is None:
        return Check(part.model, None, f"{text}: images are compared with the baseline's only")
    if kept.difference.low is None or kept.difference.high is None:
        return Check(part.model, None, f"{text}: too few prompts for an interval")
    base = kept.mean - kept.difference.point
    if base <= 0:
        return Check(part.model, None, f"{text}: the baseline's is not positive")
    ends = [1 + end / base for end in (kept.difference.low, kept.difference.high)]
    share = Interval(kept.mean / base, *ends)
    same = (1 - claim.within, 1 + claim.within)
    return Check(
        part.model, within(share, *same if claim.kind == "same" else (claim.at_least, claim.at_most)), text
    )


def _limit(claim: Claim, part: ModelPart, column: StudyColumn, row: str, figure: str) -> Check:
    cell = column.cell(*_key(part), row, figure)
    if (lacking := _lacking(part, row, cell)) or cell.value is None:
        return lacking or Check(part.model, None, row, is_absent=True)
    kind = FIGURES[figure].kind
    text = f"{row} {value_with_unit(cell.value, kind)}"
    if column.kind == "measured" and part.is_stand_in:
        return Check(part.model, None, f"{text}: a small model in the place of {part.model}")
    if column.kind == "measured" and (untrusted := _untrusted(part, column, (row,), kind)):
        return Check(part.model, None, f"{text}: {untrusted}")
    unit = 1e9 if kind == "memory" else 1.0
    ends = (None if end is None else end * unit for end in (claim.at_least, claim.at_most))
    return Check(part.model, within(cell.value, *ends), text)


def _between_gpus(
    claim: Claim, parts: Sequence[ModelPart], column: StudyColumn, columns: Sequence[StudyColumn]
) -> Iterator[Check]:
    other = next((column for column in columns if column.name == claim.than), None)
    for part in parts:
        figure = claim.figure or time_of(part)
        kind = FIGURES[figure].kind
        for row in claim.rows or _labels(part):
            here, there = (of.cell(*_key(part), row, figure).value if of else None for of in (column, other))
            if here is None or there is None:
                yield Check(part.model, None, f"{row} is not known on both", is_absent=True)
                continue
            ratio = there.point / here.point
            lower = claim.at_least if claim.at_least is not None else 1 + _SMALL_TIE
            text = f"{row} {value_with_unit(here, kind)} and {value_with_unit(there, kind)}, {ratio:.2f}x"
            yield Check(part.model, within(Interval(ratio, None, None), lower, claim.at_most), text)


def _lacking(part: ModelPart, row: str, cell: StudyCell) -> Check | None:
    """Return the check of a comparison that lacks a number, with the reason; None where it does not."""
    if cell.value is not None:
        return None
    why = cell.outcome.replace("_", " ") if cell.outcome not in ("absent", "measured") else ""
    text = ": ".join(text for text in (why, cell.note) if text) or "has no number"
    return Check(part.model, None, f"{row} {text}", is_absent=True)


def _untrusted(part: ModelPart, column: StudyColumn, names: Sequence[str], kind: str) -> str:
    """Return the reason why measured figures cannot decide the claim; "" if they can."""
    rows = [column.rows[(*_key(part), name)] for name in names]
    if kind == "memory" and any(row.memory is not None and row.memory.kind != _DEVICE for row in rows):
        return "on a CPU it is the process's resident set, libraries included"
    if kind != "time":
        return ""
    caches = [
        [t for t in Recipe.from_spec(row.record.trial.recipe) if isinstance(t, StepCache)] for row in rows
    ]
    if any(
        row.record.trial.model.is_synthetic and any(not c.is_fixed and c.compared for c in of_row)
        for row, of_row in zip(rows, caches, strict=True)
    ):
        return "with random weights a cache's threshold decides on noise"
    is_set = any(case.stands_for for case in part.cases if case.label in names)
    if is_set and (len(rows) == 1 or len({tuple(c.hits for c in of_row) for of_row in caches}) > 1):
        return "with random weights the number of skipped steps is set, and with it the outcome"
    return ""


def speed_up(
    before: Row, after: Row, baselines: Sequence[Row] = (), spread: Spread = DEFAULT_SPREAD
) -> SpeedUp | None:
    """Return the speed-up of `after` over `before`; None if the two have no baseline in common.

    Rows that were measured in the same rounds of one GPU are compared directly. Others, e.g. of a resumed study or of
    several GPUs, are compared through their baselines, which were measured beside them.
    """
    times, beside = None, None
    direct = _beside((before,), after, spread)
    if direct is not None:
        mean, num_rounds, times = direct
    else:
        of_old, of_new = (_beside(baselines, row, spread) for row in (before, after))
        if of_old is None or of_new is None:
            return None
        (to_old, rounds_old, times_old), (to_new, rounds_new, times_new) = of_old, of_new
        errors = (to_old.error, to_new.error)
        error = None if None in errors else math.hypot(*errors)  # type: ignore[arg-type]
        mean = LogMean(to_new.mean - to_old.mean, error, min(to_new.dof, to_old.dof))
        num_rounds, beside = min(rounds_old, rounds_new), (times_old, times_new)
    drift = after.cpu_ratio / before.cpu_ratio if after.cpu_ratio and before.cpu_ratio else None
    changed = f"the CPU's speed changed by {math.exp(abs(math.log(drift or 1.0))):.1f} times between the two"
    stretch = (
        1.0 if after.latency is None else stretch_of(after.latency.median.point, after.gpu_busy_s, drift)
    )
    ratio, verdict = allowing_for(
        most_stretch(drift or 1.0) if stretch is None else stretch, mean, num_rounds
    )
    doubts = ["one round only"] if num_rounds < 2 else []
    doubts += [f"{changed}, which the interval allows for"] if stretch != 1.0 else []
    is_disturbed = stretch is None and verdict is Verdict.UNCLEAR
    if is_disturbed:
        doubts = [changed]
    if any(row.cpu_share is not None and row.cpu_share < LEAST_CPU_SHARE for row in (before, after)):
        ratio, verdict, is_disturbed = mean.interval(), Verdict.UNCLEAR, True
        doubts = ["another program kept the CPU busy"]
    return SpeedUp(ratio, verdict, "; ".join(doubts), is_disturbed, num_rounds, times, beside)


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


def spread_of(rows: Iterable[Row]) -> Spread:
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
