"""The search: screen what is promising, judge the better half, prove the best beside the baseline.

What is measured goes through a `Measurer`, which is the benchmark, or in tests a recorded grid. The history is all that
the search knows; it comes from the store, so an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vivace.recipes.recipe import Recipe
from vivace.spec.record import Outcome
from vivace.stats import Gate
from vivace.tuning.budget import Budget
from vivace.tuning.samplers import Sampler
from vivace.tuning.seen import Rung, Seen, latest
from vivace.tuning.space import Space
from vivace.tuning.wanted import Wanted
from vivace.tuning.worth import chance_of, floor_of, shortest_as_fast

FINALISTS = 3
"""Recipes that are measured in the final beside the baseline: the pick and its rivals."""
BATCH = 4
PROMOTED = 0.5
_MANY = 10  # trials, of which one is kept for the end
_FINALS = 8
"""Finals at most: a finalist whose quality is not proven makes room for the next one."""
_WORTH_A_FINAL = 0.01
"""Expected improvement over the pick, as the logarithm of a speed-up."""
_WORTH_A_PLACE = 0.005
"""What a further finalist is expected to add to the best that passes."""
_LIKELY = 0.5
_HOPELESS = 0.02
"""Probabilities that a recipe's quality passes in full."""
_MOST_REFUSED = 40  # recipes that are refused without being measured, one after the other
_REACH = 0.10
"""A recipe this much slower than the best so far, or two standard errors, is not worth judging."""


class Measurer(Protocol):
    """Measures recipes. Failures are outcomes, never exceptions."""

    def refuse(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Return the recipes that cannot work here, found without measuring."""
        ...

    def screen(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Return each recipe's result of a few calls, without quality."""
        ...

    def judge(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Return each recipe's result at full steps, with quality by few prompts."""
        ...

    def prove(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Return the results of recipes measured interleaved with the baseline, with quality in full."""
        ...


class Watcher(Protocol):
    """Is told what happens, for a terminal."""

    def note(self, text: str) -> None: ...
    def measured(self, one: Seen, history: Sequence[Seen]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...


class Unwatched:
    """Nobody watches."""

    def note(self, text: str) -> None: ...
    def measured(self, one: Seen, history: Sequence[Seen]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...


@dataclass
class Search:
    """One search.

    Attributes:
        judges: whether quality is judged; if not, screening is followed by the final.
        history: everything that is known; results of an earlier run come first.
        proven: the rows of the last final.
    """

    wanted: Wanted
    space: Space
    sampler: Sampler
    measurer: Measurer
    budget: Budget
    judges: bool = True
    watcher: Watcher = field(default_factory=Unwatched)
    history: list[Seen] = field(default_factory=list)
    proven: list[Seen] = field(default_factory=list)
    batch: int = BATCH
    exhausted: bool = False
    refused: set[Recipe] = field(default_factory=set)

    @property
    def num_trials(self) -> int:
        """How many recipes have been measured, the baseline not counted."""
        return len({one.recipe for one in self.history if not one.recipe.is_baseline} - self.refused)

    def run(self) -> Seen | None:
        """Search until the budget is spent, then prove; return the pick, None if no recipe beats the baseline."""
        self._judge_promising()  # of an interrupted search
        number = getattr(self.budget, "number", math.inf)
        if self.judges and number >= _MANY:
            number -= 1  # for what a final has shown to pass, with all that works; see `_assembled`
        while self.num_trials < number and not self.budget.is_over(
            self.num_trials, self._in_the_final(self._candidates())
        ):
            recipes = self._ask(int(min(self.batch, number - self.num_trials)))
            if not recipes:
                self.exhausted = True
                break
            recipes = self.budget.affordable(recipes, self._in_the_final(self._candidates()))
            if not recipes:
                break
            self.watcher.note(f"screening {len(recipes)}: {', '.join(recipe.text for recipe in recipes)}")
            found = self.measurer.screen(recipes)
            self._note(found)
            if not any(one.recipe in recipes for one in found):
                break  # the time ended before one of them was measured
            self._leave_out_failed()
            if self.judges:
                self._judge_promising(recipes)
        self._judge_until_one_may_pass()
        return self._prove()

    def _ask(self, number: int) -> list[Recipe]:
        """Return recipes that may work here; those that do not are noted, and cost no trial."""
        refused = 0
        while True:
            recipes = self.sampler.ask(self.history, number)
            out = self.measurer.refuse(recipes)
            self.refused |= {one.recipe for one in out}
            self.history += out
            self._leave_out_failed()
            recipes = [recipe for recipe in recipes if recipe not in self.refused]
            refused += len(out)
            if recipes or not out or refused > _MOST_REFUSED or self.budget.is_over(0, []):
                return recipes

    def _note(self, found: Sequence[Seen]) -> None:
        for one in found:
            self.history.append(one)
            if not one.recipe.is_baseline:
                self.watcher.measured(one, self.history)

    def _leave_out_failed(self) -> None:
        """Remove the options that failed alone for good from the space."""
        base = self.space.base()
        for one in self.history:
            added = [t for t in one.recipe if t not in base.techniques]
            if one.outcome is Outcome.OUT_OF_MEMORY and self.wanted.max_memory_bytes is not None:
                continue  # with others that save memory it may fit
            if len(added) == 1 and not one.is_measured and one.outcome.is_final:
                self.space.leave_out(added[0], one.reason or one.outcome.value)

    def _judge_promising(self, recipes: Sequence[Recipe] | None = None) -> None:
        """Judge the better half of the screened recipes, if they can still win, and what changes the picture anew.

        What ruins the picture is then known before more recipes are made of it.
        """
        if not self.judges:
            return
        screened = [
            one
            for one in latest(self.history).values()
            if one.rung is Rung.SCREENED
            and one.keeps(self.wanted)
            and not one.recipe.is_baseline
            and (recipes is None or one.recipe in recipes)
        ]
        floor = floor_of(self.history, self.wanted)
        best = max(
            [floor, *(_gain(one) for one in self._candidates() if one.slack is None or one.slack >= 0)]
        )
        promising = [one for one in screened if _gain(one) > best - max(_REACH, 2 * one.error)]
        number = math.ceil(PROMOTED * len(screened))
        chosen = [one.recipe for one in self._by_worth(promising)[:number]]
        chosen += [one.recipe for one in screened if one.recipe not in chosen and self._tells_of_quality(one)]
        if chosen:
            self.watcher.note(f"judging the quality of {len(chosen)}")
            self._note(self.measurer.judge(chosen))

    def _tells_of_quality(self, one: Seen) -> bool:
        """Whether a recipe gains something by a technique that changes the picture, and that was never judged."""
        judged = {t for seen in self.history if seen.slack is not None for t in seen.recipe}
        return _gain(one) > _WORTH_A_FINAL and any(
            not technique.same_picture and technique not in judged for technique in one.recipe
        )

    def _judge_until_one_may_pass(self) -> None:
        """Judge recipes that were only screened, the most promising first, until one probably passes its final."""
        while self.judges and not any(chance_of(one) > _LIKELY for one in self._candidates()):
            left = [
                one
                for one in latest(self.history).values()
                if one.rung is Rung.SCREENED and one.keeps(self.wanted) and _gain(one) > _WORTH_A_FINAL
            ]
            chosen = [one.recipe for one in self._by_worth(left)[:FINALISTS]]
            chosen = self.budget.affordable(chosen, [])
            if not chosen:
                break
            self.watcher.note(f"no recipe is likely to pass yet; judging the quality of {len(chosen)} more")
            found = self.measurer.judge(chosen)
            self._note(found)
            if not any(one.recipe in chosen for one in found):
                break

    def _judge_what_may_beat(self, pick: Seen) -> None:
        """Judge recipes that were only screened and are expected to improve on the pick."""
        left = [
            one
            for one in latest(self.history).values()
            if one.rung is Rung.SCREENED and one.keeps(self.wanted) and _gain(one) > _gain(pick)
        ]
        worth = self.sampler.worth(left, self.history)
        chosen = [
            one
            for one, value in zip(left, worth, strict=True)
            if value / _gain(one) * (_gain(one) - _gain(pick)) > _WORTH_A_FINAL
        ]
        recipes = self.budget.affordable([one.recipe for one in self._by_worth(chosen)[:FINALISTS]], [])
        if self.judges and recipes:
            self.watcher.note(f"judging the quality of {len(recipes)} that may beat {pick.recipe.text}")
            self._note(self.measurer.judge(recipes))

    def _by_worth(self, found: Sequence[Seen]) -> list[Seen]:
        worth = self.sampler.worth(found, self.history)
        order = sorted(range(len(found)), key=lambda k: -worth[k])
        return [found[k] for k in order]

    def _candidates(self) -> list[Seen]:
        """Return what could be proposed, the most promising first: proven, judged, then screened recipes."""
        floor = floor_of(self.history, self.wanted)
        found = [
            one
            for one in latest(self.history).values()
            if one.keeps(self.wanted)
            and not one.recipe.is_baseline
            and not one.is_ruined
            and chance_of(one) > _HOPELESS
            and _gain(one) > floor
            and not (one.rung is Rung.PROVEN and self.judges and one.gate is not Gate.PASSED)
            and (not self.judges or one.rung > Rung.SCREENED)
        ]
        return self._by_worth(found)

    def _prove(self) -> Seen | None:
        """Measure finalists beside the baseline until one has passed and no other promises more; return the best.

        Finals after the first that found a pick are extra: they are held only while the budget lasts.
        """
        tried: set[Recipe] = set()
        for _ in range(_FINALS):
            pick = self.pick()
            found = self._candidates()
            if pick is not None:
                if self.budget.is_over(0, self._finalists(found)):
                    break
                found = [one for one in found if one.rung < Rung.PROVEN]
                if not self._finalists(found, pick):
                    self._judge_what_may_beat(pick)
                    found = [one for one in self._candidates() if one.rung < Rung.PROVEN]
            first = self._finalists(found, pick)
            finalists = [one.recipe for one in first]
            if pick is not None and self.judges:
                finalists += self._assembled(pick, first)
            if not finalists or set(finalists) <= tried:
                break
            if pick is not None:  # what is compared is measured side by side
                finalists = [pick.recipe, *finalists]
            elif tried and not self.budget.allows_another_final():
                break
            finalists += self._shorter(first) if first else []
            finalists = self._with_common(finalists)
            tried |= set(finalists)
            self.watcher.final(finalists)
            self.proven = self.measurer.prove(finalists)
            self._note(self.proven)
        return self.pick()

    def _finalists(self, found: Sequence[Seen], over: Seen | None = None) -> list[Seen]:
        """Return the candidates of which the best that passes is expected to be the fastest, the most useful first.

        Those that share their doubts, such as one path of the latents with several decoders, pass or fail together in
        each world, so one of them stands for all.

        Args:
            over: what they have to beat.
        """
        if not found:
            return []
        least, number = (0.0, FINALISTS) if over is None else (_WORTH_A_FINAL, FINALISTS - 1)
        worlds = self.sampler.values(found, self.history)
        floor = floor_of(self.history, self.wanted) if over is None else _gain(over)
        reached = np.full(len(worlds), floor)
        chosen: list[int] = []
        while len(chosen) < min(number, len(found)):
            more = np.maximum(worlds - reached[:, None], 0.0).mean(axis=0)
            which = int(np.argmax(more))
            if which in chosen or more[which] <= least:
                break
            chosen.append(which)
            least = max(least, _WORTH_A_PLACE)
            reached = np.maximum(reached, worlds[:, which])
        return self._unlike([found[k] for k in chosen])

    def _unlike(self, finalists: Sequence[Seen]) -> list[Seen]:
        """Return those that differ by more than what is believed to give nothing, of which one is measured without."""
        kept: dict[Recipe, Seen] = {}
        for one in finalists:
            kept.setdefault(self.sampler.shorter(one.recipe, self.history), one)
        return list(kept.values())

    def _in_the_final(self, found: Sequence[Seen]) -> list[Seen]:
        """Return the finalists, and the first one's shorter form if there is a place for it."""
        chosen = self._finalists(found)
        less = self.sampler.shorter(chosen[0].recipe, self.history) if chosen else Recipe()
        if len(chosen) == FINALISTS or less in {Recipe(), *(one.recipe for one in chosen)}:
            return chosen
        return [*chosen, replace(chosen[0], recipe=less)]

    def _shorter(self, finalists: Sequence[Seen]) -> list[Recipe]:
        """Return the first finalist without what is believed to give nothing, if it may win and the time suffices."""
        first = finalists[0]
        less = self.sampler.shorter(first.recipe, self.history)
        if less.is_baseline or less in {one.recipe for one in finalists} or not self.space.holds(less):
            return []
        known = latest(self.history).get(less)
        if known is not None and (not known.keeps(self.wanted) or known.is_ruined):
            return []
        trials = self.num_trials if known is None else 0
        if self.budget.is_over(trials, [*finalists, replace(first, recipe=less)]):
            return []
        return [] if self.measurer.refuse([less]) else [less]

    def _assembled(self, pick: Seen, others: Sequence[Seen]) -> list[Recipe]:
        """Return the pick with what works and is believed to make it faster, if trials and time suffice.

        What is tried is tried for what it tells, and the last trials mostly tell that it fails; this is for the answer.
        """
        recipe = self.sampler.assembled(pick.recipe, self.history)
        if recipe in {pick.recipe, *(one.recipe for one in others)}:
            return []
        known = latest(self.history).get(recipe)
        if known is None:
            if self.num_trials >= getattr(self.budget, "number", math.inf):
                return []
        elif known.rung is Rung.PROVEN or known.is_ruined or not known.keeps(self.wanted):
            return []
        if self.budget.is_over(0, [pick, *others, replace(pick, recipe=recipe)]):
            return []
        return [] if self.measurer.refuse([recipe]) else [recipe]

    def _with_common(self, finalists: list[Recipe]) -> list[Recipe]:
        """Return the finalists with what they have in common in the place of the last of three, if it may be as fast.

        Where only techniques that keep the picture are searched, finalists mostly differ by what gives nothing, such
        as `tf32` in bf16, and no belief tells it from a gain of 1 %. Measured beside them, the common part is the
        answer if it is as fast.
        """
        shared = set.intersection(*(set(recipe.techniques) for recipe in finalists))
        common = Recipe(tuple(technique for technique in finalists[0] if technique in shared))
        if self.judges or len(finalists) < FINALISTS or common.is_baseline or common in finalists:
            return finalists
        known = latest(self.history).get(common)
        best = max(_gain(one) for one in latest(self.history).values() if one.recipe in finalists)
        is_slow = known is not None and not (known.keeps(self.wanted) and _gain(known) > best - _REACH)
        if is_slow or not self.space.holds(common) or self.measurer.refuse([common]):
            return finalists
        return [*finalists[:-1], common]

    def pick(self) -> Seen | None:
        """Return the best recipe that has been proven, without techniques that were shown to give it nothing."""
        floor = floor_of(self.history, self.wanted)
        good = [
            one
            for one in latest(self.history).values()
            if one.rung is Rung.PROVEN
            and not one.recipe.is_baseline
            and one.keeps(self.wanted)
            and _gain(one) > floor
            and (not self.judges or one.gate is Gate.PASSED)
        ]
        return shortest_as_fast(max(good, key=_gain), good) if good else None


def _gain(one: Seen) -> float:
    return -math.inf if one.gain is None else one.gain
