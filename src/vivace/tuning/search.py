"""The search: screen what is promising, judge the better half, prove the best beside the baseline.

With a limit of time it holds an answer from its first half on: a final of recipes of which one passes almost surely.
What is bolder replaces the answer only where another final proves it.

What is measured goes through a `Measurer`, which is the benchmark, or in tests a recorded grid. The history is all that
the search knows; it comes from the store, so an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vivace.recipes.recipe import Recipe
from vivace.spec.record import Outcome
from vivace.stats import Gate
from vivace.tuning.beside import REACH, assembled, shorter, with_common
from vivace.tuning.budget import Budget
from vivace.tuning.finalists import MOST_USEFUL, portfolio, useful
from vivace.tuning.measurer import Measurer, Unwatched, Watcher
from vivace.tuning.samplers import Sampler
from vivace.tuning.seen import Rung, Seen, gain_of, latest
from vivace.tuning.space import Space
from vivace.tuning.wanted import Wanted
from vivace.tuning.worth import chance_of, floor_of, shortest_as_fast

BATCH = 4
PROMOTED = 0.5
_MANY = 10  # trials, of which one is kept for the end
_FINALS = 8
"""Finals at most: a finalist whose quality is not proven makes room for the next one."""
_WORTH_A_FINAL = 0.01
"""Expected improvement over the pick, as the logarithm of a speed-up."""
_LIKELY = 0.5
_WORTH_IMAGES = 0.25
_HOPELESS = 0.02
"""Probabilities that a recipe's quality passes in full."""
_MOST_REFUSED = 40  # recipes that are refused without being measured, one after the other


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
        for _ in range(_FINALS):
            self._explore(self._has_to_prove)
            if not self._has_to_prove():
                break
            self._final([one.recipe for one in self._portfolio()])
            self._decide(_WORTH_IMAGES, until_one_passes=True)
        self._explore(lambda: False)
        if self.judges and not self.exhausted and not self.num_trials:
            self._final(
                self._ask(MOST_USEFUL)
            )  # on a machine so slow that there is no time for anything before it
        self._judge_until_one_may_pass()
        return self._prove()

    def _explore(self, stops: Callable[[], bool]) -> None:
        """Screen and judge recipes until `stops` says so, or only the final still fits."""
        number = getattr(self.budget, "number", math.inf)
        if self.judges and number >= _MANY:
            number -= 1  # for what a final has shown to pass, with all that works; see `_assembled`
        while (
            not self.exhausted
            and self.num_trials < number
            and not stops()
            and not self.budget.is_over(self.num_trials, self._in_the_final(self._candidates()))
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
            if self.judges and not stops():
                self._judge_promising(recipes)

    def _has_to_prove(self) -> bool:
        """Whether there is no answer yet, and the time has come to prove one."""
        if not self.judges or self.pick() is not None:
            return False
        finalists = self._portfolio()
        is_new = any(one.rung < Rung.PROVEN for one in finalists)
        return is_new and self.budget.is_time_to_prove(finalists)

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
            [floor, *(gain_of(one) for one in self._candidates() if one.slack is None or one.slack >= 0)]
        )
        promising = [one for one in screened if gain_of(one) > best - max(REACH, 2 * one.error)]
        number = math.ceil(PROMOTED * len(screened))
        chosen = [one.recipe for one in self._by_worth(promising)[:number]]
        chosen += [one.recipe for one in screened if one.recipe not in chosen and self._tells_of_quality(one)]
        if chosen:
            self.watcher.note(f"judging the quality of {len(chosen)}")
            self._note(self.measurer.judge(chosen))

    def _tells_of_quality(self, one: Seen) -> bool:
        """Whether a recipe gains something by a technique that changes the picture, and that was never judged."""
        judged = {t for seen in self.history if seen.slack is not None for t in seen.recipe}
        return gain_of(one) > _WORTH_A_FINAL and any(
            not technique.same_picture and technique not in judged for technique in one.recipe
        )

    def _judge_until_one_may_pass(self) -> None:
        """Judge recipes that were only screened, the most promising first, until one probably passes its final."""
        while self.judges and not any(chance_of(one) > _LIKELY for one in self._candidates()):
            left = [
                one
                for one in latest(self.history).values()
                if one.rung is Rung.SCREENED and one.keeps(self.wanted) and gain_of(one) > _WORTH_A_FINAL
            ]
            chosen = [one.recipe for one in self._by_worth(left)[:MOST_USEFUL]]
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
            if one.rung is Rung.SCREENED and one.keeps(self.wanted) and gain_of(one) > gain_of(pick)
        ]
        worth = self.sampler.worth(left, self.history)
        chosen = [
            one
            for one, value in zip(left, worth, strict=True)
            if value / gain_of(one) * (gain_of(one) - gain_of(pick)) > _WORTH_A_FINAL
        ]
        recipes = self.budget.affordable([one.recipe for one in self._by_worth(chosen)[:MOST_USEFUL]], [])
        if self.judges and recipes:
            self.watcher.note(f"judging the quality of {len(recipes)} that may beat {pick.recipe.text}")
            self._note(self.measurer.judge(recipes))

    def _by_worth(self, found: Sequence[Seen]) -> list[Seen]:
        worth = self.sampler.worth(found, self.history)
        order = sorted(range(len(found)), key=lambda k: -worth[k])
        return [found[k] for k in order]

    def _candidates(self, *, screened: bool = False) -> list[Seen]:
        """Return what could be proposed, the most promising first.

        Args:
            screened: also what was not judged yet.
        """
        floor = floor_of(self.history, self.wanted)
        found = [
            one
            for one in latest(self.history).values()
            if one.keeps(self.wanted)
            and not one.recipe.is_baseline
            and not one.is_ruined
            and chance_of(one) > _HOPELESS
            and gain_of(one) > floor
            and not (one.rung is Rung.PROVEN and self.judges and one.gate is not Gate.PASSED)
            and (screened or not self.judges or one.rung > Rung.SCREENED)
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
                found = [one for one in found if one.rung < Rung.PROVEN]
                if not self._finalists(found, pick):
                    self._judge_what_may_beat(pick)
                    found = [one for one in self._candidates() if one.rung < Rung.PROVEN]
            first = self._finalists(found, pick) if pick is not None else self._portfolio()
            finalists = [one.recipe for one in first]
            if pick is not None and self.judges:
                finalists += assembled(self, pick, first)
            if not finalists or set(finalists) <= tried:
                break
            if pick is not None:  # what is compared is measured side by side
                if not self.budget.allows_rounds(first[:1] or [pick]):
                    break
                finalists = [pick.recipe, *finalists]
            elif tried and not self.budget.allows_another_final():
                break
            finalists += shorter(self, first) if first else []
            finalists = with_common(self, finalists)
            tried |= set(finalists)
            self._final(finalists)
            self._decide(_WORTH_IMAGES)
        self._decide(_HOPELESS)
        return self.pick()

    def _final(self, recipes: Sequence[Recipe]) -> None:
        """Measure finalists beside the baseline: the first ones, as many as there is time for."""
        known = latest(self.history)
        finalists = [known.get(recipe) or _not_seen(recipe) for recipe in recipes]
        while len(finalists) > 1 and not self.budget.allows_rounds(finalists):
            finalists.pop()
        recipes = [one.recipe for one in finalists]
        if not recipes:
            return
        self.watcher.final(recipes)
        self.proven = self.measurer.prove(recipes)
        self._note(self.proven)

    def _decide(self, least_chance: float, *, until_one_passes: bool = False) -> None:
        """Draw more images of finalists whose quality is unclear and that would be the pick, while there is time.

        Args:
            least_chance: to pass, of a finalist; what is less likely is left for the end.
        """
        while undecided := self._undecided(least_chance):
            if until_one_passes and self.pick() is not None:
                return
            if not self.budget.allows_images(undecided):
                return
            self.watcher.note(f"drawing more images of {', '.join(one.recipe.text for one in undecided)}")
            found = self.measurer.draw_more([one.recipe for one in undecided])
            if not found:
                return
            self._note(found)

    def _undecided(self, least_chance: float) -> list[Seen]:
        """Return the finalists that more images may turn into the pick."""
        pick = self.pick()
        least = floor_of(self.history, self.wanted) if pick is None else gain_of(pick) + _WORTH_A_FINAL
        return [
            one
            for one in latest(self.history).values()
            if one.rung is Rung.PROVEN
            and one.gate is Gate.UNCLEAR
            and one.keeps(self.wanted)
            and gain_of(one) > least
            and chance_of(one) > least_chance
        ]

    def open_ends(self) -> list[Seen]:
        """Return the recipes that a longer search may still prove, the most promising first."""
        undecided = self._undecided(_HOPELESS)
        return self._by_worth([*undecided, *self._candidates(screened=True)])

    def _portfolio(self) -> list[Seen]:
        """Return the finalists of a search without an answer: one of them passes almost surely, if that can be had."""
        every = self._candidates(screened=True)
        # What has passed, but was not shown to be faster, gets more rounds where there is nothing else.
        found = [one for one in every if one.rung < Rung.PROVEN] or every
        if not found:
            return []
        chosen = [found.index(one) for one in self._finalists(found)]
        if not self.judges:
            return [found[k] for k in chosen]
        worlds = self.sampler.values(found, self.history)
        return [found[k] for k in portfolio(worlds, floor_of(self.history, self.wanted), chosen)]

    def _finalists(self, found: Sequence[Seen], over: Seen | None = None) -> list[Seen]:
        """Return the candidates of which the best that passes is expected to be the fastest, the most useful first.

        Those that share their doubts, such as one path of the latents with several decoders, pass or fail together in
        each world, so one of them stands for all.

        Args:
            over: what they have to beat.
        """
        if not found:
            return []
        least, number = (0.0, MOST_USEFUL) if over is None else (_WORTH_A_FINAL, MOST_USEFUL - 1)
        floor = floor_of(self.history, self.wanted) if over is None else gain_of(over)
        chosen = useful(self.sampler.values(found, self.history), floor, number, least)
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
        if len(chosen) == MOST_USEFUL or less in {Recipe(), *(one.recipe for one in chosen)}:
            return chosen
        return [*chosen, replace(chosen[0], recipe=less)]

    def pick(self) -> Seen | None:
        """Return the best recipe that has been proven, without techniques that were shown to give it nothing."""
        floor = floor_of(self.history, self.wanted)
        good = [
            one
            for one in latest(self.history).values()
            if one.rung is Rung.PROVEN
            and not one.recipe.is_baseline
            and one.keeps(self.wanted)
            and gain_of(one) > floor
            and (one.least_gain is None or one.least_gain > floor)
            and (not self.judges or one.gate is Gate.PASSED)
        ]
        return shortest_as_fast(max(good, key=gain_of), good) if good else None


def _not_seen(recipe: Recipe) -> Seen:
    """Return what is known of a recipe that was not measured: that it may take as long as the baseline."""
    return Seen(recipe, Outcome.MEASURED, Rung.SCREENED)
