"""Notes on the answer of a search: its evidence, unmet requests, and skipped steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from vivace.answers.formatting import count, seconds, size
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.priors import no_record
from vivace.tuning.search.results import Result, Rung, best_of, latest
from vivace.tuning.search.search import Search
from vivace.tuning.search.timetable import FINAL_ROUNDS

_GOES_ON = "The same command goes on from here."
_SAME_ONLY = "quality cannot be judged, so only techniques that keep the image were searched"


def notes_of(search: Search, bench: Bench, pick: Result | None, trusted: str | None) -> Iterator[str]:
    """Yield the notes on the answer."""
    if (unknown := no_record(bench.environment.device_name, bench.environment.device)) is not None:
        yield unknown
    if trusted is not None:
        yield f"random weights: quality is taken from {trusted}, a small model of the same kind"
    elif of_judge := bench.judged_by.notes(bench.command):
        yield from of_judge
    elif not bench.judges:
        what = "a ControlNet with random" if bench.request.has_random_controlnet else "random"
        yield f"{what} weights: {_SAME_ONLY}"
    if search.exhausted:
        yield "every recipe that promised a gain has been measured"
    yield from _out_of_time(search, bench, pick)
    if pick is None:
        yield from unmet(search)
        yield from endings(search.history)
        if bench.time.ends_at is not None:
            yield _what_to_do(search, bench)


def _what_to_do(search: Search, bench: Bench) -> str:
    """Describe how much more time would decide, or that only another recipe would help."""
    if left := search.open_ends():
        minutes = bench.time.minutes_to_decide(left[0])
        return f"{left[0].recipe.text} may still pass: --minutes {minutes:g} would decide. {_GOES_ON}"
    if not search.num_trials:
        minutes = bench.time.minutes_to_decide(bench.time.placeholder)
        return f"there was no time to measure a recipe; give --minutes {minutes:g}. {_GOES_ON}"
    minutes = math.ceil(bench.time.total_s / 30)
    return (
        f"nothing that was measured can still pass; --minutes {minutes} would try other recipes. {_GOES_ON}"
    )


def endings(history: Sequence[Result]) -> Iterator[str]:
    """Yield how the recipes of a search without an answer ended, each kind counted."""
    counted: Counter[str] = Counter()
    for result in latest(history).values():
        if result.recipe.is_baseline or result.outcome is Outcome.UNSUPPORTED:  # refused, not tried
            continue
        ending = "better, but not proved within the limits"
        if not result.is_measured:
            ending = result.outcome_in_words
        elif result.own_gain <= 0:
            ending = "no better than the baseline"
        elif result.is_ruined:
            ending = "better, but the quality fails"
        counted[ending] += 1
    if counted:
        what = ", ".join(f"{number} {ending}" for ending, number in counted.most_common())
        yield f"of {count(counted.total(), 'recipe')} tried: {what}"


def _out_of_time(search: Search, bench: Bench, pick: Result | None) -> Iterator[str]:
    """Yield the skipped parts of the final, and what remains unproved."""
    rows = bench.finals.rows(None if pick is None else pick.recipe)
    short = [row.recipe for row in rows[1:] if row.latency and len(row.record.rounds) < FINAL_ROUNDS]
    late = [
        result.recipe.text
        for result in latest(search.history).values()
        if bench.judges
        and result.rung is Rung.FINAL
        and result.is_measured
        and not result.recipe.is_baseline
        and result.gate is None
    ]
    if short and pick is None:
        proves = f"after 1 of {FINAL_ROUNDS} rounds of the final, which proves no speed-up"
        yield f"the time ended {proves}: {', '.join(short)}. {_GOES_ON}"
    if bench.left_out:
        names = ", ".join(recipe.text for recipe in bench.left_out)
        yield f"the time ended before the final had measured {names}. {_GOES_ON}"
    if late:
        yield (
            f"the time ended before the images of {', '.join(late)} were compared with the baseline's, so the "
            f"quality is not known. {_GOES_ON}"
        )
    if pick is None and (bench.left_out or late or short) and (best := best_of(search.history)) is not None:
        times = f"{math.exp(best.own_gain):.2f}x before the final"
        yield f"the best so far, not proved, is {best.recipe.text}: {times}"


def unmet(search: Search) -> Iterator[str]:
    """Yield the limit that no measured recipe kept, and the nearest recipe."""
    objective = search.objective
    measured = [result for result in latest(search.history).values() if result.is_measured]
    for option, limit, name, in_words in (
        ("--max-memory", objective.max_memory_bytes, "peak_bytes", size),
        ("--max-first-call", objective.max_first_call_s, "first_call_s", seconds),
    ):
        reached = [(value, r.recipe.text) for r in measured if (value := getattr(r, name)) is not None]
        if limit is not None and reached and min(reached)[0] > limit:
            value, recipe = min(reached)
            yield f"{option} {in_words(limit)} was not met; nearest is {in_words(value)} with {recipe}"
    doubtful = [result for result in measured if result.rung is Rung.FINAL and result.gate is Gate.UNCLEAR]
    if doubtful:
        best = max(doubtful, key=lambda result: result.own_gain)
        times = f"{math.exp(best.own_gain):.2f} times as fast, but its quality is not proven"
        yield f"{best.recipe.text} was {times}: {best.reason}"
