"""Conclusions of a study as statements that rows can confirm or contradict, on published and on measured numbers.

A published number has no interval: it is compared as it is printed. Measured times are compared with their intervals,
so a statement that they do not settle stays undecided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from vivace.answers.formatting import seconds, size
from vivace.errors import nearest
from vivace.evidence.studies.study_columns import FIGURES
from vivace.foundation.spec.base import Spec
from vivace.foundation.stats import Interval, Verdict

_MAX_SHOWN = 3
Kind = Literal["faster", "slower", "same", "ratio", "limit", "best", "gpu", "open"]


class Claim(Spec):
    """One conclusion.

    Kinds:
        faster, slower: each of `rows` is faster or slower than `than`.
        same: each of `rows` takes as long as `than`, within the share `within`.
        ratio: `figure` of each of `rows`, divided by that of `than`, lies between `at_least` and `at_most`.
        limit: `figure` of each of `rows` lies between `at_least` and `at_most` (seconds, GB or its own unit).
        best: the first of `rows` has the lowest `figure` of all of `among`.
        gpu: every row, or each of `rows`, is faster on `gpu` than on `than`.
        open: no row can tell; `because` says why.

    Attributes:
        models: only these; empty for all of the part.
        figure: a figure; None for the part's time.
        gpus: published GPUs that the conclusion is about; empty for all. Measured devices always count.
    """

    says: str = Field(min_length=1, max_length=1000)
    kind: Kind
    part: str = ""
    models: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    than: str = ""
    figure: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    within: float = Field(default=0.03, gt=0, lt=1)
    among: tuple[str, ...] = ()
    gpu: str = ""
    gpus: tuple[str, ...] = ()
    because: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> Claim:
        needs = {
            "faster": ("rows", "than"),
            "slower": ("rows", "than"),
            "same": ("rows", "than"),
            "ratio": ("rows", "than", "figure"),
            "limit": ("rows", "figure"),
            "best": ("rows",),
            "gpu": ("gpu", "than"),
            "open": ("because",),
        }[self.kind]
        for name in needs:
            if not getattr(self, name):
                raise ValueError(f"a claim of kind {self.kind} needs {name}")
        if self.kind in ("ratio", "limit") and self.at_least is None and self.at_most is None:
            raise ValueError(f"a claim of kind {self.kind} needs at_least or at_most")
        if self.figure is not None and self.figure not in FIGURES:
            raise ValueError(f"{self.figure!r} is not a figure{nearest(self.figure, FIGURES)}")
        return self


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
