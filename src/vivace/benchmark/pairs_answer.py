"""A comparison of two recipes by pairs as an answer: one sentence, and the exit code of a CI job."""

from __future__ import annotations

from typing import Literal

from vivace.answers.answer import Answer, Case
from vivace.answers.formatting import count
from vivace.benchmark.pairs import Paired
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Verdict
from vivace.foundation.stats.sequential import Decision

REGRESSED, NOT_MEASURED, UNCLEAR = 1, 4, 5
"""Exit codes, beside 0."""


def answer_of(paired: Paired) -> Answer:
    """Return the answer; its data has the exit code."""
    status, verdict, result = _judge(paired)
    data = paired.to_dict() | {"exit_code": status}
    b = paired.records[1].trial.title
    outcome: Literal["passed", "failure", "error"] = (
        "passed" if status == 0 else "failure" if status == REGRESSED else "error"
    )
    return Answer(
        command="compare",
        headline=f"{verdict}: {result}",
        data=data,
        verdict=verdict,
        notes=tuple(data["warnings"]),
        cases=(Case(f"{b} is no slower", outcome, f"{verdict}: {result}"),),
    )


def _judge(paired: Paired) -> tuple[int, str, str]:
    """Return the exit code of a comparison, its verdict and the figures in words."""
    decision = paired.decision
    if decision is None:
        failed = next(record for record in paired.records if record.outcome is not Outcome.MEASURED)
        return NOT_MEASURED, failed.trial.title, f"{failed.outcome.value}: {failed.reason}"
    a, b = (record.trial.title for record in paired.records)
    result = f"{b} against {a}: {difference(decision)}, {count(decision.num_pairs, 'pair')}"
    option = "--max-minutes" if paired.stopped_by == "minutes" else "--max-pairs"
    limit = f"give a larger {option} to the same command, or a quieter machine"
    if decision.fail_if is not None:
        allowed = f"{100 * decision.fail_if:g} %"
        if decision.regressed is None:
            unsure = f"whether it is slower by more than {allowed} is not sure"
            return UNCLEAR, "unclear", f"{result}; {unsure}; {limit}"
        if decision.regressed:
            return REGRESSED, "slower than allowed", f"{result}; {allowed} is allowed"
        return 0, f"not slower by more than {allowed}", result
    if decision.verdict is Verdict.UNCLEAR:
        return UNCLEAR, "unclear", f"{result}; {limit}"
    return (REGRESSED if decision.verdict is Verdict.SLOWER else 0), decision.verdict.value, result


def difference(decision: Decision) -> str:
    """Return e.g. "3.1 % more time [+1.2, +5.0]"."""
    ratio = decision.shown
    percent = 100 * (ratio.point - 1)
    text = f"{abs(percent):.1f} % {'more' if percent >= 0 else 'less'} time"
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{100 * (ratio.low - 1):+.1f}, {100 * (ratio.high - 1):+.1f}]"
