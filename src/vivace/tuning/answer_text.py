"""The answer as text, 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vivace.foundation.stats import Verdict
from vivace.report.paragraphs import WIDTH, labelled, wrapped
from vivace.report.rows import Row
from vivace.report.summary import change, clock, money, ratio, seconds, size
from vivace.report.value_text import broken
from vivace.tuning.search.results import Result

if TYPE_CHECKING:
    from vivace.tuning.answer import Tuned

_LABEL = 9
_MOST = 8


def lines(tuned: Tuned, explain: bool = True) -> Iterator[str]:
    """Yield the lines of the answer.

    Args:
        explain: also print the posterior of each technique.
    """
    goal = tuned.objective.goal
    recipes = "recipe" if tuned.num_trials == 1 else "recipes"
    yield from wrapped(
        f"{tuned.model} on {tuned.device_name}, {goal}: {tuned.num_trials} {recipes} measured in "
        f"{clock(tuned.seconds)}"
    )
    yield ""
    yield from _pick(tuned)
    for note in tuned.notes:
        yield from wrapped(f"note: {note}")
    if tuned.neighbours:
        yield ""
        yield "Why not"
        yield from _neighbours(tuned)
    if len(tuned.front) > 1:
        yield ""
        yield "Nothing else measured is better in time, memory and quality at once than"
        yield from _front(tuned)
    if tuned.looser:
        yield ""
        yield "A looser limit"
        for looser in tuned.looser:
            what = (
                f"without {looser.limit}: {looser.result.recipe.text}, {_times(looser.result)} the baseline"
            )
            yield from wrapped(what, indent="  ")
    if explain and (explained := tuned.explanation.lines()):
        yield ""
        yield "Expected gain of each technique, best first (times as fast as without it)"
        yield from (f"  {line}" for line in explained)
    if tuned.pick is not None:
        yield ""
        yield "Run it"
        yield from (f"  {command}" for command in tuned.commands)


def _pick(tuned: Tuned) -> Iterator[str]:
    row, baseline = tuned.row, tuned.rows[0] if tuned.rows else None
    if tuned.pick is None or row is None or baseline is None or row.latency is None:
        yield from wrapped(
            "No recipe was shown to be better than baseline within the limits. Use baseline, or allow more time."
        )
        return
    yield from broken(f"Use {tuned.recipe}", WIDTH)
    assert baseline.latency is not None
    if row.speedup is not None:
        sure = _how_sure(row, baseline)
        yield from labelled(
            "speed",
            f"{ratio(row.speedup)} the baseline's, {seconds(row.latency.median.point)} an image "
            f"instead of {seconds(baseline.latency.median.point)}{sure}",
            _LABEL,
        )
    if row.cost_per_1000 is not None and baseline.cost_per_1000 is not None:
        cost = f"{money(row.cost_per_1000)} per 1,000 images instead of {money(baseline.cost_per_1000)}"
        yield from labelled("cost", cost, _LABEL)
    if row.memory is not None and baseline.memory is not None:
        first = "" if row.first_call_s is None else f", first call {seconds(row.first_call_s)}"
        peak = f"peak {size(row.memory.peak_bytes)} ({change(row, baseline)}){first}"
        yield from labelled("memory", peak, _LABEL)
    if row.judgement is not None:
        yield from labelled("quality", f"{row.judgement.gate.value}: {row.judgement.reason}", _LABEL)
    rivals = [
        other
        for other in tuned.rows
        if not other.is_baseline and other is not row and other.speedup is not None
    ]
    for rival in rivals:
        assert rival.speedup is not None
        state = "" if rival.judgement is None else f", quality {rival.judgement.gate.value}"
        yield from labelled("next", f"{rival.recipe}: {ratio(rival.speedup)}{state}", _LABEL)


def _how_sure(row: Row, baseline: Row) -> str:
    """Return a note in brackets on why a speed-up is not proved; "" if it is."""
    if len(row.record.rounds) == 1:
        return " (measured in one round: not proved)"
    if row.verdict is Verdict.FASTER:
        return ""
    if row.verdict is Verdict.SAME:
        return " (no faster beyond 1 %)"
    if row.is_disturbed or baseline.is_disturbed:
        return " (unclear: another program kept the machine busy)"
    return " (unclear: too noisy to be certain)"


def _neighbours(tuned: Tuned) -> Iterator[str]:
    neighbours = tuned.neighbours
    measured = [neighbour for neighbour in neighbours if neighbour.result is not None]
    for neighbour in [*measured[:_MOST], *(n for n in neighbours if n.result is None)]:
        gain = (
            ""
            if neighbour.result is None or neighbour.result.gain is None
            else f" {_times(neighbour.result)}"
        )
        yield from wrapped(
            f"{neighbour.change}:{gain}, {neighbour.reason}".replace(":,", ":"), indent="    ", first="  "
        )
    if len(measured) > _MOST:
        yield f"  and {len(measured) - _MOST} more (the page has all)"


def _front(tuned: Tuned) -> Iterator[str]:
    front: Sequence[Result] = tuned.front[:_MOST]
    cells = [
        (_time(result), "-" if not result.peak_bytes else size(result.peak_bytes), _quality(result))
        for result in front
    ]
    heads = ("s/image", "peak", "quality")
    widths = [max(len(head), *(len(row[k]) for row in cells)) for k, head in enumerate(heads)]
    yield f"  {'s/image':>{widths[0]}}  {'peak':>{widths[1]}}  {'quality':<{widths[2]}}  recipe"
    indent = sum(2 + width for width in widths) + 2
    for result, row in zip(front, cells, strict=True):
        first, *rest = broken(result.recipe.text, max(24, WIDTH - indent))
        yield f"  {row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {first}"
        yield from (" " * indent + part for part in rest)


def _quality(result: Result) -> str:
    if result.recipe.is_baseline:
        return "its own"
    if result.gate is None:
        return "unjudged"
    return result.verdict


def _time(result: Result) -> str:
    return "-" if result.seconds is None else seconds(result.seconds)


def _times(result: Result) -> str:
    return "-" if result.gain is None else f"{math.exp(result.gain):.2f}x"
