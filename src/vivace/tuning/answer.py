"""The answer of a search: the pick with its evidence, the front, its neighbours, and the gain of looser limits."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row
from vivace.tuning.explained import ExplainedResult, explained_results, why_lost
from vivace.tuning.explanation import Explanation
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung, latest


@dataclass(frozen=True)
class Neighbour:
    """A recipe that differs from the pick by one technique, and why it is not the pick.

    Attributes:
        change: "without X", "with X" or "X instead of Y".
        result: None if it was not measured.
    """

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
        expected: logarithm of the expected gain of the pick with one technique less, by recipe.
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
    trusted: str | None = None
    options: tuple[tuple[str, str | int | float], ...] = ()
    task: Task = "text"
    explanation: Explanation = field(default_factory=Explanation)
    expected: Mapping[str, float] = field(default_factory=dict)
    command: str = ""

    @property
    def recipe(self) -> str:
        """The recipe to use: the pick's, or "baseline"."""
        return "baseline" if self.pick is None else self.pick.recipe.text

    @property
    def row(self) -> Row | None:
        """The pick's row of the final."""
        rows = [row for row in self.rows if row.recipe == self.recipe and not row.is_baseline]
        return rows[0] if rows else None

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
        return explained_results(self.history, self.pick, self.objective, self.judges)

    @property
    def neighbours(self) -> list[Neighbour]:
        """The measured recipes with one technique less, more or swapped, and the unmeasured ones with one less."""
        if self.pick is None:
            return []
        return _neighbours(self.pick, self.history, self.objective, self.judges, self.expected)

    @property
    def looser(self) -> list[Looser]:
        """The cost of each limit, as far as it was measured."""
        return _looser(self.pick, self.history, self.objective, self.judges)

    @property
    def commands(self) -> list[str]:
        """The lines that run the pick."""
        quoted = shlex.quote(self.recipe)
        own = "".join(
            f" --{name.replace('_', '-')} {shlex.quote(value) if isinstance(value, str) else f'{value:g}'}"
            for name, value in (*self.options, *self._files_to_give)
        )
        task = "" if self.task == "text" else f", task={self.task!r}"
        return [
            f'vivace generate "a prompt" --model {self.model} --recipe {quoted}{own}',
            f"vivace export --model {self.model} --recipe {quoted}{own} -o draw.py",
            f"vivace.load({self.model!r}, {self.recipe!r}{task})",
        ]

    @property
    def _files_to_give(self) -> list[tuple[str, str]]:
        """The files that a command needs and the user did not name: the search used images that ship with vivace."""
        needed = {"image": ["image"], "edit": ["image"], "inpaint": ["image", "mask"], "control": ["control"]}
        names = {name for name, _ in self.options}
        return [(name, "FILE") for name in needed.get(self.task, []) if name not in names]

    def page(self) -> str:
        """Return the page of this search as HTML, one file that needs no network."""
        from vivace.answers.page import page_of
        from vivace.tuning.tune_answer import answer_of

        return page_of(answer_of(self))

    def _repr_html_(self) -> str:
        """Return the page for notebooks."""
        from vivace.answers.page import in_notebook

        return in_notebook(self.page())

    def to_json(self) -> dict[str, Any]:
        from vivace.tuning.tune_answer import headline_of

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
            "pick": None if self.pick is None else result_json(self.pick),
            "proven": headline_of(self)[1],
            "final": [row.to_json() for row in self.rows],
            "front": [result_json(result) for result in self.front],
            "neighbours": [
                {"change": n.change, "recipe": n.recipe, "measured": n.result is not None, "reason": n.reason}
                for n in self.neighbours
            ],
            "looser": [{"limit": looser.limit, **result_json(looser.result)} for looser in self.looser],
            "commands": self.commands,
            "trials": self.num_trials,
            "seconds": round(self.seconds, 1),
            "cut": self.cut,
            "notes": list(self.notes),
            "trusted": self.trusted,
            "explained": [belief.to_json() for belief in self.explanation.beliefs],
        }

    def __str__(self) -> str:
        from vivace.answers.terminal import text_of
        from vivace.tuning.tune_answer import answer_of

        return text_of(answer_of(self)).rstrip()


def result_json(result: Result) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "recipe": result.recipe.text,
        "outcome": result.outcome.value,
        "rung": result.rung.name.lower(),
        "gain": None if result.gain is None else math.exp(result.gain),
        "seconds": result.seconds,
        "peak_bytes": result.peak_bytes,
        "first_call_s": result.first_call_s,
        "quality": None if result.gate is None else result.gate.value,
        "images": result.images,
        "reason": result.reason,
    }


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


def _expected(less: Recipe, pick: Result, objective: Objective, expected: Mapping[str, float]) -> str:
    """Describe the model's expectation of a neighbour that was not measured."""
    if less.text not in expected:
        return "not measured"
    times = math.exp((pick.gain or 0.0) - expected[less.text])
    if times >= 2:
        what = "memory" if objective.measures_memory else "time"
        return f"not measured; about {times:.1f} times the {what} is expected"
    if times < 1.01:
        return "not measured; about as good"
    what = "more memory" if objective.measures_memory else "slower"
    return f"not measured; about {100 * (times - 1):.0f} % {what} is expected"


def _neighbours(
    pick: Result, history: Sequence[Result], objective: Objective, judges: bool, expected: Mapping[str, float]
) -> list[Neighbour]:
    results = latest(history)
    mine = set(pick.recipe.techniques)
    neighbours: dict[Recipe, Neighbour] = {}
    for technique in pick.recipe:
        less = pick.recipe.without(technique)
        result = results.get(less)
        reason = (
            _expected(less, pick, objective, expected)
            if result is None
            else why_lost(result, pick, objective, judges)
        )
        if less.is_baseline:
            reason = why_lost(result, pick, objective, judges) if result else "the baseline"
        neighbours[less] = Neighbour(f"without {technique.text}", less.text, result, reason)
    for recipe, result in results.items():
        theirs = set(recipe.techniques)
        more, less_ = theirs - mine, mine - theirs
        if recipe in neighbours or len(more) != 1 or len(less_) > 1:
            continue
        (added,) = more
        change = f"with {added.text}"
        if less_:
            (gone,) = less_
            change = f"{added.text} instead of {gone.text}"
        neighbours[recipe] = Neighbour(change, recipe.text, result, why_lost(result, pick, objective, judges))
    return list(neighbours.values())


def _looser(
    pick: Result | None, history: Sequence[Result], objective: Objective, judges: bool
) -> list[Looser]:
    """Return, for each limit, the best recipe that breaks only this limit and is better than the pick."""
    least = 0.0 if pick is None or pick.gain is None else pick.gain

    def broken(result: Result) -> set[str]:
        options = set()
        if objective.max_memory_bytes is not None and (result.peak_bytes or 0) > objective.max_memory_bytes:
            options.add("--max-memory")
        if objective.max_first_call_s is not None and (result.first_call_s or 0) > objective.max_first_call_s:
            options.add("--max-first-call")
        if (
            judges
            and not result.recipe.is_baseline
            and result.gate is not Gate.PASSED
            and result.rung > Rung.SCREENED
        ):
            options.add("--min-quality")
        return options

    best: dict[str, Result] = {}
    for result in history:
        refused = broken(result)
        if not result.is_measured or len(refused) != 1 or (result.gain or 0.0) <= least + 2 * result.error:
            continue
        (limit,) = refused
        if limit not in best or (result.gain or 0.0) > (best[limit].gain or 0.0):
            best[limit] = result
    return [Looser(limit, result) for limit, result in sorted(best.items())]
