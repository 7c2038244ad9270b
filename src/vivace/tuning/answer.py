"""The answer of a search: the pick with its evidence, the front, its neighbours, and the gain of looser limits."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
from vivace.benchmark.run import reader
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row
from vivace.report.run_answer import answer_of as answer_of_run
from vivace.report.run_charts import memory_plot
from vivace.report.summary import change
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung, latest
from vivace.tuning.search.search import Explanation

_MOST = 8
"""Neighbours, and recipes of the front, that a terminal lists."""
_DISTURBED = "another program kept the machine busy"


@dataclass(frozen=True)
class Neighbour:
    """A recipe that differs from the pick by one technique, and why it is not the pick; with a result if measured."""

    change: str
    recipe: str
    result: Result | None
    reason: str


@dataclass(frozen=True)
class Looser:
    """The gain of a looser limit: the fastest recipe that fails this limit alone."""

    limit: str
    result: Result


@dataclass(frozen=True)
class ExplainedResult:
    """A recipe of the search. `reason` says why it is not the answer; "" for the answer and for the baseline."""

    result: Result
    is_pick: bool
    reason: str

    @property
    def measured_how(self) -> str:
        """How thoroughly it was measured."""
        if not self.result.is_measured:
            return self.result.outcome_in_words
        return {
            Rung.SCREENED: "screened: a few calls",
            Rung.JUDGED: f"judged by {self.result.images} images",
            Rung.FINAL: "final, beside the baseline",
        }[self.result.rung]


@dataclass(frozen=True)
class Tuned:
    """The answer of `vivace.tune`. `print(tuned)` shows it; `recipe` is the pick's text.

    Attributes:
        pick: the winning recipe; None if none was shown to be better than the baseline.
        rows: the final: the baseline, the pick and the runner-up, interleaved.
        history: every result, the most thorough of each recipe.
        cut: options that were left out, with the reason.
        options: steps, size and images that are not the model's own, as options of `vivace generate`.
        task: the task of the images.
        notes: remarks for the reader, such as the basis of the quality verdict, or a limit that could not be met.
        explanation: the posterior of each technique, and its sources.
        command: the command line of the search.
    """

    model: str
    device_name: str
    objective: Objective
    pick: Result | None
    rows: tuple[Row, ...]
    history: tuple[Result, ...]
    cut: dict[str, str]
    notes: tuple[str, ...]
    store: Path
    judges: bool
    num_trials: int
    seconds: float
    options: tuple[tuple[str, str | int | float], ...] = ()
    task: Task = "text"
    explanation: Explanation = field(default_factory=Explanation)
    command: str = ""

    @property
    def recipe(self) -> str:
        """The recipe to use: the pick's, or "baseline"."""
        return "baseline" if self.pick is None else self.pick.recipe.text

    @property
    def row(self) -> Row | None:
        """The pick's row of the final."""
        rows = [row for row in self.rows if row.recipe == self.recipe and not row.is_baseline]
        return rows[0] if rows and rows[0].latency is not None else None

    @property
    def headline(self) -> str:
        """The answer in a sentence that claims only what was proved."""
        where = f"{self.model} on {self.device_name}"
        if self.row is None:
            others = self.rows[1:]
            is_disturbed = others and all(row.is_disturbed or self.rows[0].is_disturbed for row in others)
            why = f", since {_DISTURBED}: measure again when all is quiet" if is_disturbed else ""
            return f"{where}: no recipe was shown to be better than the baseline{why}"
        if self.objective.measures_memory:
            memory, before = self.row.memory, self.rows[0].memory
            if memory is None or before is None:
                return f"{where}: less memory"
            return f"{where}: {100 * (1 - memory.peak_bytes / before.peak_bytes):.0f} % less memory"
        if self.row.speedup is None:
            return f"{where}: the speed-up is not known"
        return f"{where}: {self.row.speedup.point:.2f} times as fast" + (
            f", {self.doubt}" if self.doubt else ""
        )

    @property
    def doubt(self) -> str:
        """Why the pick's speed-up is not proved, or is none; "" if it is proved."""
        row = self.row
        if row is None or row.speedup is None:
            return "not known"
        if len(row.record.rounds) == 1:
            return "measured in one round: not proved"
        if row.verdict is Verdict.SAME:
            return "no faster beyond 1 %"
        if row.verdict is Verdict.FASTER:
            return ""
        is_disturbed = row.is_disturbed or self.rows[0].is_disturbed
        why = _DISTURBED if is_disturbed else "too noisy to be certain"
        return f"unclear: {why}"

    @property
    def is_proved(self) -> bool:
        """Whether the final proved what the headline says."""
        if self.row is None or self.objective.measures_memory:
            return self.row is not None
        return not self.doubt or (len(self.row.record.rounds) > 1 and self.row.verdict is Verdict.SAME)

    @property
    def front(self) -> list[Result]:
        """The Pareto front of time, memory and quality, the fastest recipe first."""
        usable = [
            result
            for result in self.history
            if result.is_measured and result.seconds and not result.is_ruined
        ]
        front = [result for result in usable if not any(_dominates(other, result) for other in usable)]
        return sorted(front, key=lambda result: result.seconds or math.inf)

    @property
    def tried(self) -> list[ExplainedResult]:
        """Every recipe that ran, the pick first, and the reason why each other one is not the answer."""
        tried = []
        for result in latest(self.history).values():
            if result.outcome is not Outcome.UNSUPPORTED:
                is_pick = self.pick is not None and result.recipe == self.pick.recipe
                is_silent = is_pick or result.recipe.is_baseline
                tried.append(ExplainedResult(result, is_pick, "" if is_silent else self.why_lost(result)))
        return sorted(tried, key=lambda t: (not t.is_pick, -t.result.own_gain, t.result.recipe.text))

    def why_lost(self, result: Result) -> str:
        """Describe why a recipe is not the pick, or why it cannot be one where there is no pick."""
        pick = self.pick
        if not result.is_measured:
            return f"{result.outcome_in_words}: {result.reason}"
        if result.gate is Gate.FAILED or result.is_ruined:
            return "its quality fails"
        if broken := result.broken_limits(self.objective):
            is_large = "--max-memory" in broken
            return f"{'it takes more memory' if is_large else 'its first call takes longer'} than allowed"
        if pick is None:
            return self._why_not_proved(result)
        slower = math.exp((pick.gain or 0.0) - (result.gain or 0.0)) - 1
        noise = math.hypot(result.error, pick.error)
        if slower > 2 * noise:
            is_memory = self.objective.measures_memory
            if slower >= 1:
                return f"{1 + slower:.1f} times the {'memory' if is_memory else 'time'}"
            return f"{100 * slower:.0f} % {'more memory' if is_memory else 'slower'}"
        if self.judges and result.gate is not Gate.PASSED:
            return "as fast within the noise; its quality is not proven"
        if slower > 0:
            return f"{100 * slower:.1f} % slower, within the noise"
        return "as fast within the noise when screened; not in the final"

    def _why_not_proved(self, result: Result) -> str:
        if result.own_gain <= 0:
            return "no better than the baseline"
        if self.judges and result.gate is Gate.UNCLEAR:
            return "better; its quality is not proven"
        if self.judges and result.gate is None:
            return "better; there was no time to judge its quality"
        if result.rung is Rung.FINAL:
            return "no better than the baseline beyond the noise"
        return "better; there was no time to prove it beside the baseline"

    @property
    def neighbours(self) -> list[Neighbour]:
        """The measured recipes with one technique less, more or swapped, and the unmeasured ones with one less."""
        if self.pick is None:
            return []
        results = latest(self.history)
        mine = set(self.pick.recipe.techniques)
        neighbours: dict[Recipe, Neighbour] = {}
        for technique in self.pick.recipe:
            less = self.pick.recipe.without(technique)
            result = results.get(less)
            reason = "the baseline" if less.is_baseline else "not measured"
            reason = reason if result is None else self.why_lost(result)
            neighbours[less] = Neighbour(f"without {technique.text}", less.text, result, reason)
        for recipe, result in results.items():
            theirs = set(recipe.techniques)
            more, gone = theirs - mine, mine - theirs
            if recipe not in neighbours and len(more) == 1 and len(gone) <= 1:
                (added,) = more
                change = f"{next(iter(gone)).text}" if gone else ""
                change = f"{added.text} instead of {change}" if change else f"with {added.text}"
                neighbours[recipe] = Neighbour(change, recipe.text, result, self.why_lost(result))
        return list(neighbours.values())

    @property
    def looser(self) -> list[Looser]:
        """The cost of each limit, as far as it was measured: the best recipe that breaks only this limit."""
        least = 0.0 if self.pick is None or self.pick.gain is None else self.pick.gain
        best: dict[str, Result] = {}
        for result in self.history:
            broken = result.broken_limits(self.objective)
            is_judged = self.judges and not result.recipe.is_baseline and result.rung > Rung.SCREENED
            broken += ["--min-quality"] if is_judged and result.gate is not Gate.PASSED else []
            is_better = result.is_measured and result.own_gain > least + 2 * result.error
            if len(broken) == 1 and is_better:
                limit = broken[0]
                if limit not in best or result.own_gain > best[limit].own_gain:
                    best[limit] = result
        return [Looser(limit, result) for limit, result in sorted(best.items())]

    @property
    def commands(self) -> list[str]:
        """The lines that run the pick."""
        quoted = shlex.quote(self.recipe)
        own = "".join(
            f" --{name.replace('_', '-')} {shlex.quote(value) if isinstance(value, str) else f'{value:g}'}"
            for name, value in (*self.options, *self._files_to_give())
        )
        task = "" if self.task == "text" else f", task={self.task!r}"
        return [
            f'vivace generate "a prompt" --model {self.model} --recipe {quoted}{own}',
            f"vivace export --model {self.model} --recipe {quoted}{own} -o draw.py",
            f"vivace.load({self.model!r}, {self.recipe!r}{task})",
        ]

    def _files_to_give(self) -> Iterator[tuple[str, str]]:
        """Yield the files that a command needs and the user did not name, as images that ship with vivace were used."""
        needed = {"image": ["image"], "edit": ["image"], "inpaint": ["image", "mask"], "control": ["control"]}
        names = {name for name, _ in self.options}
        yield from ((name, "FILE") for name in needed.get(self.task, []) if name not in names)

    def page(self) -> str:
        """Return the page of this search as HTML, one file that needs no network."""
        from vivace.answers.page import page_of

        return page_of(answer_of(self))

    def _repr_html_(self) -> str:
        """Return the page for notebooks."""
        from vivace.answers.page import in_notebook

        return in_notebook(self.page())

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device_name,
            "goal": self.objective.goal,
            "limits": {
                "max_memory_bytes": self.objective.max_memory_bytes,
                "max_first_call_s": self.objective.max_first_call_s,
                "quality": self.objective.limits.model_dump(mode="json"),
            },
            "recipe": self.recipe,
            "pick": None if self.pick is None else self.pick.to_json(),
            "proven": self.is_proved,
            "final": [row.to_json() for row in self.rows],
            "front": [result.to_json() for result in self.front],
            "neighbours": [
                {"change": n.change, "recipe": n.recipe, "measured": n.result is not None, "reason": n.reason}
                for n in self.neighbours
            ],
            "looser": [{"limit": looser.limit, **looser.result.to_json()} for looser in self.looser],
            "commands": self.commands,
            "trials": self.num_trials,
            "seconds": round(self.seconds, 1),
            "cut": self.cut,
            "notes": list(self.notes),
            "explained": [belief.to_json() for belief in self.explanation.beliefs],
        }

    def __str__(self) -> str:
        from vivace.answers.terminal import text_of

        return text_of(answer_of(self)).rstrip()


def _dominates(result: Result, other: Result) -> bool:
    pairs = [
        (result.seconds or math.inf, other.seconds or math.inf),
        (result.peak_bytes or math.inf, other.peak_bytes or math.inf),
        (_rank(result), _rank(other)),
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _rank(result: Result) -> int:
    """Order quality: the baseline's own and proven, passed by few images, unclear, not judged."""
    if result.gate is Gate.PASSED:
        return 0 if result.rung is Rung.FINAL or result.recipe.is_baseline else 1
    return 2 if result.gate is Gate.UNCLEAR else 3


def answer_of(tuned: Tuned) -> Answer:
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
        yield Fact("quality", row.judgement.words or row.judgement.gate.value, row.judgement.reason)
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
