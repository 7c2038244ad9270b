"""Go on with a comparison until every recipe has an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from vivace.benchmark.run import Run
from vivace.foundation.stats.sequential import looks
from vivace.foundation.stats.until import MOST_ROUNDS, Until
from vivace.report.rows import log_speedups


def go_on(run_rounds: Callable[[int], Run], until: Until, least: int, max_minutes: float) -> Run:
    """Add rounds until every recipe has an answer, or the time is over; return the run with them.

    Args: run_rounds: measures the missing rounds, up to a number.
        least: rounds to begin with.
    """
    start = time.monotonic()
    numbers = [number for number in looks(MOST_ROUNDS) if number > max(2, least)]
    numbers.insert(0, max(2, least))
    for position, number in enumerate(numbers):
        run = run_rounds(number)
        open_, sentences = _answers(run, until, len(numbers))
        spent = time.monotonic() - start
        following = numbers[position + 1] if position + 1 < len(numbers) else None
        if not open_ or following is None:
            break
        expected = spent / number * (following - number)
        if spent + expected > 60 * max_minutes:
            sentences.append(
                f"stopped after {number} rounds: {following} would take longer than --max-minutes {max_minutes:g}"
            )
            break
    return replace(run, answers=tuple(sentences))


def _answers(run: Run, until: Until, num_looks: int) -> tuple[bool, list[str]]:
    """Return whether any recipe has no answer yet, and a line for each."""
    is_open, sentences = False, []
    for compared in run.comparisons:
        for record, ratio, rounds in log_speedups(compared.records):
            name = record.trial.title
            if ratio is None:
                sentences.append(f"{name}: {record.outcome.value.replace('_', ' ')}")
                continue
            answer = until.answer(ratio, rounds, num_looks)
            if answer is not None:
                is_same = answer == "same" and until.same_within is not None
                margin = f" within {100 * (until.same_within or 0):g} %" if is_same else ""
                sentences.append(f"{name}: {answer.value}{margin}, after {rounds} rounds")
            elif until.is_missed(ratio, num_looks):
                sentences.append(f"{name}: surely not, after {rounds} rounds ({ratio.interval().point:.3g}x)")
            else:
                is_open = True
                sentences.append(f"{name}: undecided after {rounds} rounds")
    return is_open, sentences
