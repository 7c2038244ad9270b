"""What a search answers: the pick with its evidence, the front, the pick's neighbours, and what a looser limit buys."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row
from vivace.spec.workload import Task
from vivace.stats import Gate
from vivace.tuning.believed import Explanation
from vivace.tuning.seen import Rung, Seen, latest
from vivace.tuning.tried import Tried, tried_of, why_lost
from vivace.tuning.wanted import Wanted


@dataclass(frozen=True)
class Neighbour:
    """A recipe that differs from the pick by one technique, and why it is not the pick.

    Attributes:
        change: "without X", "with X" or "X instead of Y".
        seen: None if it was not measured.
    """

    change: str
    recipe: str
    seen: Seen | None
    reason: str


@dataclass(frozen=True)
class Looser:
    """What a looser limit would buy: the fastest recipe that only this limit refuses."""

    limit: str
    seen: Seen


@dataclass(frozen=True)
class Tuned:
    """The answer of `vivace.tune`. `print(tuned)` shows it; `recipe` is the pick's text.

    Attributes:
        pick: the recipe that won; None if none was shown to be better than the baseline.
        rows: the final: the baseline, the pick and the runner-up, interleaved.
        history: every result, the most thorough of each recipe.
        cut: options that were left out, with the reason.
        options: steps, size and pictures that are not the model's own, as options of `vivace generate`.
        task: what was drawn from.
        notes: what a reader must know: what quality rests on, which limit could not be met.
        explanation: what is believed of each technique, and why.
        expected: logarithm of the gain that is expected of the pick with one technique less, by recipe.
        command: the command line of the search.
    """

    model: str
    device_name: str
    wanted: Wanted
    pick: Seen | None
    rows: tuple[Row, ...]
    history: tuple[Seen, ...]
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
        found = [row for row in self.rows if row.recipe == self.recipe and not row.is_baseline]
        return found[0] if found else None

    @property
    def front(self) -> list[Seen]:
        """Measured recipes that no other one beats in time, memory and quality at once, the fastest first."""
        usable = [one for one in self.history if one.is_measured and one.seconds and not one.is_ruined]
        found = [one for one in usable if not any(_dominates(other, one) for other in usable)]
        return sorted(found, key=lambda one: one.seconds or math.inf)

    @property
    def tried(self) -> list[Tried]:
        """Every recipe that ran, the pick first, and why each other one is not the answer."""
        return tried_of(self.history, self.pick, self.wanted, self.judges)

    @property
    def neighbours(self) -> list[Neighbour]:
        """The recipes that were measured with one technique less, more or swapped, and those with one less that were
        not."""
        if self.pick is None:
            return []
        return _neighbours(self.pick, self.history, self.wanted, self.judges, self.expected)

    @property
    def looser(self) -> list[Looser]:
        """What each limit costs, as far as it was measured."""
        return _looser(self.pick, self.history, self.wanted, self.judges)

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
        """The files that a command needs and that were not given: the search took pictures that ship with vivace."""
        needed = {"image": ["image"], "edit": ["image"], "inpaint": ["image", "mask"], "control": ["control"]}
        given = {name for name, _ in self.options}
        return [(name, "FILE") for name in needed.get(self.task, []) if name not in given]

    def page(self) -> str:
        """Return the page of this search as HTML, one file that needs no network."""
        from vivace.tuning.page import page_of

        return page_of(self)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device_name,
            "goal": self.wanted.goal,
            "limits": {
                "max_memory_bytes": self.wanted.max_memory_bytes,
                "max_first_call_s": self.wanted.max_first_call_s,
                "quality": self.wanted.limits.model_dump(mode="json"),
            },
            "recipe": self.recipe,
            "pick": None if self.pick is None else seen_json(self.pick),
            "final": [row.to_json() for row in self.rows],
            "front": [seen_json(one) for one in self.front],
            "neighbours": [
                {"change": n.change, "recipe": n.recipe, "measured": n.seen is not None, "reason": n.reason}
                for n in self.neighbours
            ],
            "looser": [{"limit": one.limit, **seen_json(one.seen)} for one in self.looser],
            "commands": self.commands,
            "trials": self.num_trials,
            "seconds": round(self.seconds, 1),
            "cut": self.cut,
            "notes": list(self.notes),
            "trusted": self.trusted,
            "explained": [one.to_json() for one in self.explanation.beliefs],
        }

    def __str__(self) -> str:
        from vivace.tuning.text import lines

        return "\n".join(lines(self))


def seen_json(one: Seen) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "recipe": one.recipe.text,
        "outcome": one.outcome.value,
        "rung": one.rung.name.lower(),
        "gain": None if one.gain is None else math.exp(one.gain),
        "seconds": one.seconds,
        "peak_bytes": one.peak_bytes,
        "first_call_s": one.first_call_s,
        "quality": None if one.gate is None else one.gate.value,
        "reason": one.reason,
    }


def _dominates(one: Seen, other: Seen) -> bool:
    pairs = [
        (one.seconds or math.inf, other.seconds or math.inf),
        (one.peak_bytes or math.inf, other.peak_bytes or math.inf),
        (_rank(one), _rank(other)),
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _rank(one: Seen) -> int:
    """Order quality: the baseline's own and proven, passed by few images, unclear, not judged."""
    if one.gate is Gate.PASSED:
        return 0 if one.rung is Rung.PROVEN or one.recipe.is_baseline else 1
    return 2 if one.gate is Gate.UNCLEAR else 3


def _expected(less: Recipe, pick: Seen, wanted: Wanted, expected: Mapping[str, float]) -> str:
    """Say what the model expects of a neighbour that was not measured."""
    if less.text not in expected:
        return "not measured"
    times = math.exp((pick.gain or 0.0) - expected[less.text])
    if times >= 2:
        what = "memory" if wanted.measures_memory else "time"
        return f"not measured; about {times:.1f} times the {what} is expected"
    if times < 1.01:
        return "not measured; about as good"
    what = "more memory" if wanted.measures_memory else "slower"
    return f"not measured; about {100 * (times - 1):.0f} % {what} is expected"


def _neighbours(
    pick: Seen, history: Sequence[Seen], wanted: Wanted, judges: bool, expected: Mapping[str, float]
) -> list[Neighbour]:
    known = latest(history)
    mine = set(pick.recipe.techniques)
    found: dict[Recipe, Neighbour] = {}
    for technique in pick.recipe:
        less = pick.recipe.without(technique)
        one = known.get(less)
        reason = (
            _expected(less, pick, wanted, expected) if one is None else why_lost(one, pick, wanted, judges)
        )
        if less.is_baseline:
            reason = why_lost(one, pick, wanted, judges) if one else "the baseline"
        found[less] = Neighbour(f"without {technique.text}", less.text, one, reason)
    for recipe, one in known.items():
        theirs = set(recipe.techniques)
        more, less_ = theirs - mine, mine - theirs
        if recipe in found or len(more) != 1 or len(less_) > 1:
            continue
        (added,) = more
        change = f"with {added.text}"
        if less_:
            (gone,) = less_
            change = f"{added.text} instead of {gone.text}"
        found[recipe] = Neighbour(change, recipe.text, one, why_lost(one, pick, wanted, judges))
    return list(found.values())


def _looser(pick: Seen | None, history: Sequence[Seen], wanted: Wanted, judges: bool) -> list[Looser]:
    """Return, for each limit, the best recipe that breaks it alone and is better than the pick."""
    least = 0.0 if pick is None or pick.gain is None else pick.gain

    def broken(one: Seen) -> set[str]:
        found = set()
        if wanted.max_memory_bytes is not None and (one.peak_bytes or 0) > wanted.max_memory_bytes:
            found.add("--max-memory")
        if wanted.max_first_call_s is not None and (one.first_call_s or 0) > wanted.max_first_call_s:
            found.add("--max-first-call")
        if judges and not one.recipe.is_baseline and one.gate is not Gate.PASSED and one.rung > Rung.SCREENED:
            found.add("--min-quality")
        return found

    best: dict[str, Seen] = {}
    for one in history:
        refused = broken(one)
        if not one.is_measured or len(refused) != 1 or (one.gain or 0.0) <= least + 2 * one.error:
            continue
        (limit,) = refused
        if limit not in best or (one.gain or 0.0) > (best[limit].gain or 0.0):
            best[limit] = one
    return [Looser(limit, one) for limit, one in sorted(best.items())]
