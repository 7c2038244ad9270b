"""Notes on the answer: its evidence, unmet requests, and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vivace.answers.formatting import seconds, size
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.priors import no_record
from vivace.tuning.model.utility import best_of
from vivace.tuning.search.results import Result, Rung, latest
from vivace.tuning.search.search import Search
from vivace.tuning.search.timetable import FINAL_ROUNDS

_GOES_ON = "The same command goes on from here."


def notes_of(search: Search, bench: Bench, pick: Result | None, trusted: str | None) -> list[str]:
    """Return the notes on the answer."""
    notes = (
        [unknown]
        if (unknown := no_record(bench.environment.device_name, bench.environment.device)) is not None
        else []
    )
    if trusted is not None:
        notes.append(f"random weights: quality is taken from {trusted}, a small model of the same kind")
    elif of_judge := bench.judged_by.notes(bench.command):
        notes += of_judge
    elif bench.request.has_random_controlnet:
        notes.append(
            "a ControlNet with random weights: quality cannot be judged, so only techniques that keep the image were "
            "searched"
        )
    elif not bench.judges:
        notes.append(
            "random weights: quality cannot be judged, so only techniques that keep the image were searched"
        )
    if search.exhausted:
        notes.append("every recipe that promised a gain has been measured")
    notes += _out_of_time(search, bench, pick)
    if pick is None:
        notes += [*_unmet(search), *why_none(search.history), *_what_to_do(search, bench)]
    return notes


def _what_to_do(search: Search, bench: Bench) -> list[str]:
    """Describe how much more time would decide, or that only another recipe would help."""
    if bench.time.ends_at is None:
        return []
    left = search.open_ends()
    if not left and not search.num_trials:
        minutes = bench.time.minutes_to_decide(bench.time.placeholder)
        return [f"there was no time to measure a recipe; give --minutes {minutes:g}. {_GOES_ON}"]
    if not left:
        minutes = math.ceil(bench.time.total_s / 30)
        return [
            f"nothing that was measured can still pass; --minutes {minutes} would try other recipes. {_GOES_ON}"
        ]
    best = left[0]
    return [
        f"{best.recipe.text} may still pass: --minutes {bench.time.minutes_to_decide(best):g} would decide. {_GOES_ON}"
    ]


def why_none(history: Sequence[Result]) -> list[str]:
    """Describe how the recipes of a search without an answer ended, each kind counted."""
    counted: dict[str, int] = {}
    for result in latest(history).values():
        if not result.recipe.is_baseline and result.outcome is not Outcome.UNSUPPORTED:  # refused, not tried
            kind = _ending(result)
            counted[kind] = counted.get(kind, 0) + 1
    if not counted:
        return []
    number = sum(counted.values())
    what = ", ".join(
        f"{count} {kind}"
        for kind, count in sorted(counted.items(), key=lambda counted_kind: -counted_kind[1])
    )
    return [f"of {number} {'recipe' if number == 1 else 'recipes'} tried: {what}"]


def _ending(result: Result) -> str:
    if not result.is_measured:
        return result.outcome.value.replace("_", " ")
    if (result.gain or 0.0) <= 0:
        return "no better than the baseline"
    if result.is_ruined:
        return "better, but the quality fails"
    return "better, but not proved within the limits"


def _out_of_time(search: Search, bench: Bench, pick: Result | None) -> list[str]:
    """Describe the skipped parts of the final, and what remains unproved."""
    notes = []
    rows = bench.finals.rows(None if pick is None else pick.recipe)
    short = [row.recipe for row in rows[1:] if row.latency and len(row.record.rounds) < FINAL_ROUNDS]
    if short and pick is None:
        notes.append(
            f"the time ended after 1 of {FINAL_ROUNDS} rounds of the final, which proves no speed-up: "
            f"{', '.join(short)}. {_GOES_ON}"
        )
    if bench.left_out:
        names = ", ".join(recipe.text for recipe in bench.left_out)
        notes.append(f"the time ended before the final had measured {names}. {_GOES_ON}")
    late = [
        result.recipe.text
        for result in latest(search.history).values()
        if bench.judges
        and result.rung is Rung.FINAL
        and result.is_measured
        and not result.recipe.is_baseline
        and result.gate is None
    ]
    if late:
        notes.append(
            f"the time ended before the images of {', '.join(late)} were compared with the baseline's, so the "
            f"quality is not known. {_GOES_ON}"
        )
    if pick is None and (bench.left_out or late or short) and (best := best_of(search.history)) is not None:
        notes.append(
            f"the best so far, not proved, is {best.recipe.text}: {math.exp(best.gain or 0.0):.2f}x before the final"
        )
    return notes


def _unmet(search: Search) -> list[str]:
    """Describe the limit that no measured recipe kept, and the nearest recipe."""
    objective, notes = search.objective, []
    measured = [result for result in latest(search.history).values() if result.is_measured]
    limit, first = objective.max_memory_bytes, objective.max_first_call_s
    peaks = [result for result in measured if result.peak_bytes is not None]
    if limit is not None and peaks and all((result.peak_bytes or 0) > limit for result in peaks):
        least = min(peaks, key=lambda result: result.peak_bytes or 0)
        notes.append(
            f"--max-memory {size(limit)} was not met; nearest is {size(least.peak_bytes or 0)} with {least.recipe.text}"
        )
    calls = [result for result in measured if result.first_call_s is not None]
    if first is not None and calls and all((result.first_call_s or 0) > first for result in calls):
        quick = min(calls, key=lambda result: result.first_call_s or 0)
        notes.append(
            f"--max-first-call {seconds(first)} was not met; nearest is {seconds(quick.first_call_s or 0)} with "
            f"{quick.recipe.text}"
        )
    doubtful = [result for result in measured if result.rung is Rung.FINAL and result.gate is Gate.UNCLEAR]
    if doubtful:
        best = max(doubtful, key=lambda result: result.gain or 0.0)
        notes.append(
            f"{best.recipe.text} was {math.exp(best.gain or 0.0):.2f} times as fast, but its quality is not proven: "
            f"{best.reason}"
        )
    return notes
