"""The answer of a search: the recipe with its proof, its images, and why each other recipe is not it.

It covers that search only: the rows of its final and the recipes that it tried, nothing else in the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vivace.answers.answer import (
    Answer,
    Bar,
    BarPart,
    Bars,
    Cell,
    Fact,
    Facts,
    File,
    Plot,
    PlotPoint,
    Section,
    Table,
)
from vivace.answers.formatting import clock, count, file_stem, money, ratio, seconds, size
from vivace.benchmark.stored_answer import reader
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.stats import Gate, Interval
from vivace.report.rows import Row
from vivace.report.run_answer import answer_of as answer_of_run
from vivace.report.run_charts import memory_plot
from vivace.report.summary import change
from vivace.tuning.answer import ExplainedResult, Tuned
from vivace.tuning.search.results import Result

_MOST = 8
"""Neighbours, and recipes of the front, that a terminal lists."""


def answer_of(tuned: Tuned) -> Answer:
    """Return the answer of a search."""
    final, data, is_proved = _final(tuned), tuned.to_json(), tuned.is_proved
    tried = _numbered(tuned)
    return Answer(
        command="tune",
        headline=tuned.headline,
        data=data,
        verdict="proved" if is_proved else "not proved" if tuned.pick is not None else "none",
        about=(
            f"{tuned.model} on {tuned.device_name}, {tuned.objective.goal}: {count(tuned.num_trials, 'recipe')} "
            f"measured in {clock(tuned.seconds)}",
        ),
        facts=Facts(tuple(_pick(tuned)), are_tiles=True),
        sections=(
            *(_proof(final, is_proved) if final is not None else ()),
            Section("Why not", (Facts(tuple(_neighbours(tuned))),)),
            Section("Trade-offs", (_front(tuned, tried), *_plots(tuned, tried))),
            Section("A looser limit", (Facts(tuple(_looser(tuned))),)),
            Section(
                "What was tried, and why not",
                (_tried(tuned, tried),),
                where="page",
            ),
            _beliefs(tuned),
            Section(
                f"{count(len(tuned.cut), 'option')} left out before anything was timed",
                (Facts(tuple(_left_out(tuned))),),
                where="page",
                is_folded=True,
            ),
            *(final.sections[-2:] if final is not None else ()),
        ),
        notes=tuned.notes,
        commands=tuple(_commands(tuned)),
        reproduce=tuned.command,
        files=(File(f"{file_stem(f'vivace-tune-{tuned.model}')}.json", json.dumps(data) + "\n"),),
        explains=final is not None,
    )


def _pick(tuned: Tuned) -> Iterator[Fact]:
    """Yield the recipe and its figures, beside the baseline's."""
    row, baseline = tuned.row, tuned.rows[0] if tuned.rows else None
    if row is None or baseline is None or row.latency is None:
        yield Fact("use", "baseline", "or allow more time")
        return
    yield Fact("use", tuned.recipe)
    assert baseline.latency is not None
    if row.speedup is not None:
        before = seconds(baseline.latency.median.point)
        times = f"{seconds(row.latency.median.point)} an image instead of {before}"
        doubt = f" ({tuned.doubt})" if tuned.doubt else ""
        yield Fact("speed", f"{ratio(row.speedup)} the baseline's", f"{times}{doubt}")
    if row.cost_per_1000 is not None and baseline.cost_per_1000 is not None:
        yield Fact(
            "cost",
            f"{money(row.cost_per_1000)} per 1,000 images",
            f"instead of {money(baseline.cost_per_1000)}",
        )
    if row.memory is not None and baseline.memory is not None:
        yield Fact(
            "memory", f"peak {size(row.memory.peak_bytes)}", f"{change(row, baseline)} against the baseline"
        )
    if row.first_call_s is not None:
        own = "" if baseline.first_call_s is None else f"the baseline's {seconds(baseline.first_call_s)}"
        yield Fact("first call", seconds(row.first_call_s), own)
    if row.judgement is not None:
        yield Fact("quality", row.judgement.gate.value, row.judgement.reason)
    else:
        yield Fact("quality", "not judged", "" if tuned.judges else "random weights")
    for rival in tuned.rows[1:]:
        if rival is not row and rival.speedup is not None:
            state = "" if rival.judgement is None else f", quality {rival.judgement.gate.value}"
            yield Fact("next", rival.recipe, f"{ratio(rival.speedup)}{state}")


def _final(tuned: Tuned) -> Answer | None:
    """Return the final's rows as a comparison: the baseline, the pick, and its rivals by their speed."""
    if not tuned.rows:
        return None
    started = min((r.started_at for row in tuned.rows for r in row.record.rounds if r.started_at), default="")
    return answer_of_run(_final_rows(tuned), read=reader([tuned.store]), started_at=started)


def _final_rows(tuned: Tuned) -> list[Row]:
    others = sorted(
        tuned.rows[1:],
        key=lambda row: (row.recipe != tuned.recipe, -(row.speedup.point if row.speedup else 0.0)),
    )
    return [*tuned.rows[:1], *others]


def _proof(final: Answer, is_proved: bool) -> list[Section]:
    """Return the final's table, charts and images, for a page."""
    how = "Measured again, each round in its own process, the recipes in turns with the baseline."
    table, remarks, charts, images, *details = final.sections[:-2]
    proof = Section(
        "Proof" if is_proved else "The final", (how, *table.blocks, *remarks.blocks), where="page"
    )
    return [proof, replace(charts, is_folded=True), images, *details]


def _numbered(tuned: Tuned) -> list[ExplainedResult]:
    """Return the attempts in the order of the page: the final's rows first, so that numbers agree everywhere."""
    places = {row.record.trial.recipe.text: place for place, row in enumerate(_final_rows(tuned))}
    return sorted(tuned.tried, key=lambda trial: places.get(trial.result.recipe.text, len(places)))


def _neighbours(tuned: Tuned) -> Iterator[Fact]:
    measured = [neighbour for neighbour in tuned.neighbours if neighbour.result is not None]
    for neighbour in [*measured[:_MOST], *(n for n in tuned.neighbours if n.result is None)]:
        gain = "" if neighbour.result is None else _times(neighbour.result)
        yield Fact("", f"{neighbour.change}", ", ".join(part for part in (gain, neighbour.reason) if part))
    if len(measured) > _MOST:
        yield Fact("", f"and {len(measured) - _MOST} more (the page has all)")


def _looser(tuned: Tuned) -> Iterator[Fact]:
    for looser in tuned.looser:
        yield Fact(
            f"without {looser.limit}", looser.result.recipe.text, f"{_times(looser.result)} the baseline"
        )


def _front(tuned: Tuned, tried: Sequence[ExplainedResult]) -> Table:
    """Return the recipes that nothing else beats; none if that is one."""
    numbers = {trial.result.recipe: number for number, trial in enumerate(tried, 1)}
    front = [result for result in tuned.front if result.recipe in numbers] if len(tuned.front) > 1 else []
    rows = [
        (
            Cell(result.recipe.text, below="the answer" if result == tuned.pick else ""),
            "–" if result.seconds is None else seconds(result.seconds),
            "–" if not result.peak_bytes else size(result.peak_bytes),
            "its own" if result.recipe.is_baseline else result.verdict or "unjudged",
        )
        for result in front
    ]
    note = "Nothing else that was measured is better in time, memory and quality at once than these."
    headings = ("recipe", "s/image", "peak memory", "quality")
    return Table.of(headings, rows, texts=("quality",), note=note, is_code=True)


def _plots(tuned: Tuned, tried: Sequence[ExplainedResult]) -> list[Plot]:
    """Return the speed of all measured recipes against their memory."""
    base = next((trial.result for trial in tried if trial.result.recipe.is_baseline), None)
    rows = {row.record.trial.recipe.text: row for row in tuned.rows}
    points = []
    for number, trial in enumerate(tried, 1):
        result = trial.result
        if not result.is_measured or not result.peak_bytes or result.gain is None:
            continue
        times = math.exp(result.gain)
        if tuned.objective.measures_memory:  # the gain is one of memory
            if base is None or not base.seconds or not result.seconds:
                continue
            times = base.seconds / result.seconds
        row, recipe = rows.get(result.recipe.text), result.recipe
        x = row.speedup if row is not None and row.speedup is not None else Interval(times, None, None)
        look = "baseline" if recipe.is_baseline else "same" if recipe.same_picture else "changed"
        label = f"{number} {recipe.text}: {times:.2f}×, {size(result.peak_bytes)}"
        peak = Interval(result.peak_bytes, None, None)
        points.append(PlotPoint(x, peak, look, label, number, recipe.text, result.is_ruined))
    plot = memory_plot(points)
    return [] if plot is None else [plot]


def _tried(tuned: Tuned, tried: Sequence[ExplainedResult]) -> Bars:
    """Return each attempt as a bar, with why it is not the answer; the thin line is the baseline."""
    gains = [math.exp(trial.result.gain) for trial in tried if trial.result.gain is not None]
    most = max([1.0, *gains])
    bars = []
    for number, trial in enumerate(tried, 1):
        result = trial.result
        width = 0.0 if result.gain is None else round(100 * math.exp(result.gain) / most, 2)
        look = "total" if result.recipe.is_baseline else "saving" if trial.is_pick else "other"
        part = BarPart(0.0, width, "failed" if result.is_ruined else look)
        is_doubtful = result.is_measured and result.reason and result.gate in (Gate.FAILED, Gate.UNCLEAR)
        reason = f"{trial.reason}: {result.reason}" if is_doubtful else trial.reason
        bars.append(
            Bar(
                result.recipe.text,
                "" if result.gain is None else _times(result),
                number,
                "the baseline" if result.recipe.is_baseline else reason,
                _detail(trial, tuned.judges),
                (part,) if width else (),
                (round(100 / most, 2),),
                badge="the answer" if trial.is_pick else "",
            )
        )
    unit = " (of memory: times less)" if tuned.objective.measures_memory else ""
    about = (
        f"Times as fast as the baseline beside it{unit}; the thin line is the baseline. What was only screened is less "
        "certain than what was in the final."
    )
    return Bars("", tuple(bars), about)


def _detail(trial: ExplainedResult, judges: bool) -> str:
    """Return an attempt's time, memory and quality, and how thoroughly it was measured."""
    result = trial.result
    if not result.is_measured:
        return ""
    quality = "" if result.recipe.is_baseline else f"quality {result.verdict}"
    if result.gate is None and not result.recipe.is_baseline:
        quality = "quality not judged" if judges else ""
    parts = [
        f"{seconds(result.seconds)} an image" if result.seconds else "",
        size(result.peak_bytes) if result.peak_bytes else "",
        quality,
        trial.measured_how,
    ]
    return " · ".join(part for part in parts if part)


def _beliefs(tuned: Tuned) -> Section:
    """Return the posterior of each technique, and its sources."""
    explanation = tuned.explanation
    rows = [
        (
            one.technique,
            f"{one.times:.2f}x",
            f"{one.low:.2f} to {one.high:.2f}",
            "yes" if one.was_tried else "no",
        )
        for one in explanation.beliefs
    ]
    notes = []
    if number := explanation.num_unknown:
        what = "was" if number == 1 else "were"
        notes.append(
            f"{count(number, 'more option')} {what} not tried, and nothing tells whether they help here."
        )
    notes += [f"Learnt from {name}: {count(number, 'figure')}." for name, number in explanation.sources]
    headings = ("technique", "times as fast", "95 % interval", "tried here")
    table = Table.of(headings, rows, texts=headings[2:], is_code=True, note="\n".join(notes))
    return Section("What is expected of each technique", (table,), is_folded=True, is_detail=True)


def _left_out(tuned: Tuned) -> Iterator[Fact]:
    """Yield the options left out before anything was timed, by reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for option, reason in tuned.cut.items():
        by_reason.setdefault(reason, []).append(short_form(option))
    for reason, options in sorted(by_reason.items(), key=lambda group: -len(group[1])):
        yield Fact(reason, ", ".join(options))


def _commands(tuned: Tuned) -> Iterator[Fact]:
    if tuned.pick is not None:
        for name, command in zip(("draw", "script", "in Python"), tuned.commands, strict=True):
            yield Fact(name, command, is_command=True)


def _times(result: Result) -> str:
    return "–" if result.gain is None else f"{math.exp(result.gain):.2f}x"
