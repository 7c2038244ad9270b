"""The page of one search as a self-contained HTML file: the answer, its proof, its images, and all attempts.

It covers that search only: the rows of its final and the recipes that it tried, nothing else in the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vivace.benchmark.store import Store
from vivace.benchmark.store.images import image_path
from vivace.errors import StoreError
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.stats import Gate, Interval
from vivace.report.downloads import OfferedFile, text_file
from vivace.report.page import (
    MAX_IMAGE_BYTES,
    Section,
    environment,
    policy_for,
    section_view,
    sorting_script,
    style_sheet,
)
from vivace.report.scatter import Plot, Value, memory_plot
from vivace.report.summary import change, clock, money, seconds, size
from vivace.report.value_text import breakable, count, sentence
from vivace.tuning.explained import ExplainedResult
from vivace.tuning.headline import headline
from vivace.tuning.search.results import Result

if TYPE_CHECKING:
    from vivace.tuning.answer import Tuned

_MOST_SHOWN = 24
"""Number of recipes that are listed at first; the others can be unfolded."""


@dataclass(frozen=True)
class HeadlineFigure:
    """A figure of the answer: its name, the value, and a line below it."""

    name: str
    value: str
    below: str


@dataclass(frozen=True)
class TrialLine:
    """An attempt with a recipe.

    Attributes:
        kind: "baseline", "pick", "failed", "other" or "lost" (not measured); sets the bar's look.
        start, width: of the bar, in percent of its box; `width` is 0 without one.
        times: how many times as fast as the baseline it is, e.g. "5.41×"; "" if it was not measured.
        detail: peak memory, quality, and how thoroughly it was measured.
    """

    number: int
    recipe: str
    kind: str
    width: float
    times: str
    detail: str
    reason: str


@dataclass(frozen=True)
class FrontLine:
    """A recipe on the Pareto front of time, memory and quality."""

    number: int
    recipe: str
    time: str
    peak: str
    quality: str
    is_pick: bool


@dataclass(frozen=True)
class _Charts:
    """The variables of the scatter plot's template."""

    plots: tuple[Plot, ...]
    unplotted: tuple[()] = ()


def page_of(tuned: Tuned) -> str:
    """Return the page of a search as HTML."""
    style = style_sheet() + _own_style()
    script = sorting_script()
    tried = _numbered(tuned)
    lines = [_line(number, trial, tuned, _most_times(tried)) for number, trial in enumerate(tried, 1)]
    with ExitStack() as stack:
        section = _section(tuned, _reader(tuned.store, stack))
    best = headline(tuned)
    return (
        environment("vivace.tuning")
        .get_template("tune.html")
        .render(
            tuned=tuned,
            title=best.text,
            is_proved=best.is_proved,
            figures=_figures(tuned),
            notes=[_note(text) for text in tuned.notes],
            recipe=tuned.recipe,
            measured=f"{count(tuned.num_trials, 'recipe')} measured in {clock(tuned.seconds)}",
            finished=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            s=section,
            lines=lines[:_MOST_SHOWN],
            more_lines=lines[_MOST_SHOWN:],
            unity=round(100 / _most_times(tried), 2),
            front=_front(tuned, tried),
            charts_of_all=_Charts(_plots(tuned, tried)),
            not_measured=[neighbour for neighbour in tuned.neighbours if neighbour.result is None],
            looser=[
                (looser.limit, looser.result.recipe.text, _times(looser.result)) for looser in tuned.looser
            ],
            left_out=_left_out(tuned),
            answer_file=_answer_file(tuned),
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy_for(style, script)),
        )
    )


def _note(text: str) -> str:
    """Return a note as a sentence; one that ends with a command has no full stop, so that it can be copied."""
    ends_with_command = text.rpartition(": ")[2].startswith("vivace ")
    return text[:1].upper() + text[1:] if ends_with_command else sentence(text)


def _own_style() -> str:
    return resources.files("vivace.tuning").joinpath("templates", "tune.css").read_text("utf-8")


def _reader(folder: Path, stack: ExitStack) -> Callable[[str], bytes | None]:
    """Return a reader of the store's images, which returns None for all if the store is gone."""
    try:
        store = stack.enter_context(Store.read_only(folder))
    except StoreError:
        return lambda sha256: None

    def read(sha256: str) -> bytes | None:
        for path in (store.image_path(sha256), image_path(store.folder / "sources", sha256)):
            with suppress(OSError):
                return path.read_bytes()
        return None

    return read


def _numbered(tuned: Tuned) -> list[ExplainedResult]:
    """Return the attempts in the order of the page: the final's rows first, so that numbers agree everywhere."""
    places = {recipe: place for place, recipe in enumerate(_final_order(tuned))}
    tried = tuned.tried
    return sorted(tried, key=lambda trial: places.get(trial.result.recipe.text, len(places)))


def _final_order(tuned: Tuned) -> list[str]:
    """Return the recipes of the final: the baseline, the pick, and its rivals by their speed."""
    rows = sorted(
        tuned.rows[1:],
        key=lambda row: (row.recipe != tuned.recipe, -(row.speedup.point if row.speedup else 0.0)),
    )
    return [row.record.trial.recipe.text for row in (*tuned.rows[:1], *rows)]


def _section(tuned: Tuned, read: Callable[[str], bytes | None]) -> Any:
    """Return the final's rows as the report shows them; None without a final."""
    if not tuned.rows:
        return None
    order = _final_order(tuned)
    rows = tuple(sorted(tuned.rows, key=lambda row: order.index(row.record.trial.recipe.text)))
    started = min((r.started_at for row in rows for r in row.record.rounds if r.started_at), default="")
    return section_view("final", Section("", started, rows), read, MAX_IMAGE_BYTES)


def _figures(tuned: Tuned) -> list[HeadlineFigure]:
    """Return the figures of the answer, beside the baseline's."""
    row, baseline = tuned.row, tuned.rows[0] if tuned.rows else None
    if row is None or baseline is None or row.latency is None or baseline.latency is None:
        return []
    figures = []
    if row.speedup is not None:
        interval = row.speedup
        ends = (
            "measured in one round, not proved"
            if interval.low is None
            else f"{interval.low:.2f} to {interval.high:.2f}, 95 % interval"
        )
        figures.append(HeadlineFigure("times as fast", f"{interval.point:.2f}×", ends))
    before = seconds(baseline.latency.median.point)
    figures.append(HeadlineFigure("an image", seconds(row.latency.median.point), f"instead of {before}"))
    if row.cost_per_1000 is not None and baseline.cost_per_1000 is not None:
        figures.append(
            HeadlineFigure(
                "1,000 images", money(row.cost_per_1000), f"instead of {money(baseline.cost_per_1000)}"
            )
        )
    if row.memory is not None and baseline.memory is not None:
        figures.append(
            HeadlineFigure(
                "peak memory", size(row.memory.peak_bytes), change(row, baseline).replace("-", "−") + _against
            )
        )
    if row.first_call_s is not None:
        own = "" if baseline.first_call_s is None else f"the baseline’s {seconds(baseline.first_call_s)}"
        figures.append(HeadlineFigure("first call", seconds(row.first_call_s), own))
    if row.judgement is not None:
        figures.append(HeadlineFigure("quality", row.judgement.gate.value, row.judgement.reason))
    else:
        figures.append(HeadlineFigure("quality", "not judged", "random weights" if not tuned.judges else ""))
    return figures


_against = " against the baseline"


def _most_times(tried: Sequence[ExplainedResult]) -> float:
    """Return the largest gain of all, which fills the box of a bar; at least 1."""
    return max([1.0, *(math.exp(trial.result.gain) for trial in tried if trial.result.gain is not None)])


def _line(number: int, trial: ExplainedResult, tuned: Tuned, most: float) -> TrialLine:
    result = trial.result
    if result.recipe.is_baseline:
        kind = "baseline"
    elif not result.is_measured:
        kind = "lost"
    else:
        kind = "pick" if trial.is_pick else "failed" if result.is_ruined else "other"
    details = []
    if result.seconds:
        details.append(f"{seconds(result.seconds)} an image")
    if result.peak_bytes:
        details.append(size(result.peak_bytes))
    details.append(_quality(result, tuned.judges))
    details.append(trial.measured_how)
    reason = trial.reason
    if result.is_measured and result.reason and result.gate is not None and result.gate is not Gate.PASSED:
        reason = f"{reason}: {result.reason}"
    return TrialLine(
        number=number,
        recipe=result.recipe.text,
        kind=kind,
        width=0.0 if result.gain is None else round(100 * math.exp(result.gain) / most, 2),
        times=_times(result),
        detail=" · ".join(part for part in details if part) if result.is_measured else "",
        reason=reason if result.recipe.is_baseline or trial.is_pick else sentence(reason),
    )


def _quality(result: Result, judges: bool) -> str:
    if result.recipe.is_baseline:
        return ""
    if result.gate is None:
        return "quality not judged" if judges else ""
    return f"quality {result.verdict}"


def _times(result: Result) -> str:
    return "" if result.gain is None else f"{math.exp(result.gain):.2f}×"


def _front(tuned: Tuned, tried: Sequence[ExplainedResult]) -> list[FrontLine]:
    numbers = {trial.result.recipe: number for number, trial in enumerate(tried, 1)}
    return [
        FrontLine(
            numbers[result.recipe],
            result.recipe.text,
            "–" if result.seconds is None else seconds(result.seconds),
            "–" if not result.peak_bytes else size(result.peak_bytes),
            "its own"
            if result.recipe.is_baseline
            else _quality(result, tuned.judges).removeprefix("quality "),
            tuned.pick is not None and result.recipe == tuned.pick.recipe,
        )
        for result in tuned.front
        if result.recipe in numbers
    ]


def _plots(tuned: Tuned, tried: Sequence[ExplainedResult]) -> tuple[Plot, ...]:
    """Return the speed of all measured recipes against their memory."""
    base = next((trial.result for trial in tried if trial.result.recipe.is_baseline), None)
    rows = {row.record.trial.recipe.text: row for row in tuned.rows}
    values = []
    for number, trial in enumerate(tried, 1):
        result = trial.result
        if not result.is_measured or not result.peak_bytes or result.gain is None:
            continue
        times = math.exp(result.gain)
        if tuned.objective.measures_memory:  # the gain is one of memory
            if base is None or not base.seconds or not result.seconds:
                continue
            times = base.seconds / result.seconds
        row = rows.get(result.recipe.text)
        x = row.speedup if row is not None and row.speedup is not None else Interval(times, None, None)
        values.append(
            Value(
                number,
                result.recipe.text,
                "baseline"
                if result.recipe.is_baseline
                else "same"
                if result.recipe.same_picture
                else "changed",
                result.is_ruined,
                result.gate is Gate.UNCLEAR,
                x,
                Interval(result.peak_bytes, None, None),
                f"{times:.2f}×, {size(result.peak_bytes)}",
            )
        )
    plot = memory_plot(values)
    return () if plot is None else (plot,)


def _left_out(tuned: Tuned) -> list[tuple[str, list[Markup]]]:
    """Return the recipes left out before anything was timed, by reason, the most frequent first."""
    by_reason: dict[str, list[Markup]] = {}
    for option, reason in tuned.cut.items():
        by_reason.setdefault(reason, []).append(breakable(short_form(option)))
    return sorted(by_reason.items(), key=lambda group: -len(group[1]))


def _answer_file(tuned: Tuned) -> OfferedFile:
    """Return the answer's text, to save."""
    return text_file(f"{tuned}\n", "txt", f"vivace-tune-{tuned.model}")
