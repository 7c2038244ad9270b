"""Measure recipes with the benchmark: each rung of the search is a comparison with the baseline, kept in the store."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vivace.benchmark import AskedWorkload, Study, Timing, run_study
from vivace.benchmark.comparison import workload_of
from vivace.benchmark.deadline import Deadline
from vivace.benchmark.launcher import Launcher
from vivace.benchmark.places.local_pool import NumGpus
from vivace.benchmark.planned import predict_by_worker
from vivace.benchmark.run import Compared
from vivace.benchmark.runner import Progress
from vivace.benchmark.schedule import comparable
from vivace.benchmark.store import Store
from vivace.benchmark.support import ask_support
from vivace.models.find import SYNTHETIC, Found
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row, rows_of
from vivace.report.summary import size
from vivace.spec.environment import Environment
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome
from vivace.spec.trial import Trial
from vivace.spec.workload import Task, Workload
from vivace.stats import MIN_GROUPS, Gate
from vivace.tuning.asked import Asked
from vivace.tuning.belief import Datum
from vivace.tuning.judge import Judge
from vivace.tuning.listening import Listening
from vivace.tuning.pace import SCREENING, WARM_UP, Pace, reported_compiling
from vivace.tuning.peaks import Peaks
from vivace.tuning.priors import Source
from vivace.tuning.seen import Rung, Seen, latest, seen_of
from vivace.tuning.wanted import Wanted

MOST_SEEDS = 3
_FEWEST_STEPS = 4
_OTHER_WORKLOAD, _OTHER_MACHINE = 0.1, 0.25  # standard errors of a stored gain as a prediction of this one
_FINAL_ROUNDS = 2
_SHARE_OF_IMAGES = 0.25
"""Of a search's time; if its final takes no more with the most images, it draws them: fewer verdicts are unclear."""
MOST_OF_THE_TIME = 0.2
"""Of a search, for a round of a recipe before the final, unless it is expected to take longer."""
_LEAST_TIMEOUT_S = 20.0
_LATE = 2.0
"""How many times as long as expected a round may take before it is stopped."""
_GRACE = 0.05
"""Of a search's time: what the quality pass of the final may take beyond it."""


@dataclass
class Bench:
    """A `Measurer` on this machine.

    Attributes:
        prompts: all prompts of the final.
        judges: whether images are compared with the baseline's, by `judged_by`.
        timeout_s: of a round.
        ends_at, total_s: by `time.monotonic`, when the search has to end, and how long it may last; None for no limit.
        last, left_out: the last comparison of finalists with the baseline, and those that it had no time for.
        peaks: what `vivace plan` predicts.
        pace: how long measurements take here.
    """

    model: str
    found: Found
    wanted: Wanted
    asked: Asked
    prompts: tuple[str, ...]
    judges: bool
    store: Path
    launcher: Launcher
    environment: Environment
    device: str
    threads: int
    progress: Progress
    command: str
    gpus: NumGpus | None = None
    timeout_s: float = 600.0
    seeds: int = 1
    ends_at: float | None = None
    total_s: float = 0.0
    last: Compared | None = None
    left_out: tuple[Recipe, ...] = ()
    baseline: Seen | None = None
    judged_by: Judge = field(default_factory=Judge)
    pace: Pace = field(default_factory=lambda: Pace(on_gpu=False))

    def __post_init__(self) -> None:
        self.peaks = Peaks(self._predict)
        self.pace.on_gpu = self.environment.device != "cpu"
        self.pace.reported_s = reported_compiling(self.model.removeprefix(SYNTHETIC))

    def start(self) -> Seen | None:
        """Measure the baseline alone; None if it fails. Its stages say what techniques can touch.

        Few steps suffice where only techniques are searched that keep the picture: full ones are not screened.
        """
        steps = self._few_steps if self.wanted.same_picture_only else None
        workload, timing = self._workload(Rung.SCREENED, steps), self._timing(Rung.SCREENED)
        row = self._rows((), workload, timing, judges=False)[0]
        self.baseline = seen_of(row, row, Rung.SCREENED, self.wanted, self._left_of(workload))
        if self.baseline is not None and self.baseline.seconds:
            batch = self.asked.batch
            denoising = dict(self.baseline.stages_s).get("steps", 0.0) * (
                1 if steps is None else self._steps / steps
            )
            few = self._few_steps
            left = 0.0 if few is None else denoising * (1 - few / self._steps)
            self.pace.batch, self.pace.base_s = batch, batch * self.baseline.seconds
            self.pace.few_s = None if few is None else batch * (self.baseline.seconds - left)
        return self.baseline

    def spend(self, minutes: float | None, began: float) -> None:
        """Take in how long the search may last: the final draws the most images if there is time for them."""
        if minutes is not None:
            self.total_s = 60 * minutes
            self.ends_at = began + self.total_s
        if self.judges and minutes is not None:
            images = len(self.prompts) * MOST_SEEDS
            if self.pace.of_final([], _FINAL_ROUNDS, images) < _SHARE_OF_IMAGES * 60 * minutes:
                self.seeds = MOST_SEEDS

    def refuse(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Techniques judge the model without its weights; memory is predicted if it is limited."""
        texts = [recipe.text for recipe in recipes if recipe not in self._supported]
        reasons: dict[str, str] = {}
        if texts:
            found = ask_support(self.launcher, self.model, texts, self.device, self.task, self.asked.batch)
            reasons = found.refusals(recipes, self.wanted.keeps)
        self._supported |= {recipe for recipe in recipes if recipe.text not in reasons}
        refused = [
            Seen(recipe, Outcome.UNSUPPORTED, Rung.SCREENED, reason=reasons[recipe.text])
            for recipe in recipes
            if recipe.text in reasons
        ]
        limit = self.wanted.max_memory_bytes
        if limit is not None and self.environment.device == "cuda":
            left = [recipe for recipe in recipes if recipe.text not in reasons]
            for recipe, peak in zip(left, self.peaks.least(left), strict=True):
                if peak is not None and peak > limit:
                    why = f"`vivace plan` predicts a peak of {size(peak)}, more than {size(limit)}"
                    refused.append(Seen(recipe, Outcome.OUT_OF_MEMORY, Rung.SCREENED, reason=why))
        return refused

    def screen(self, recipes: Sequence[Recipe]) -> list[Seen]:
        """Those that keep the picture do the same in every step, so few steps tell; others are drawn at full length."""
        alike = [recipe for recipe in recipes if recipe.same_picture and self._few_steps is not None]
        others = [recipe for recipe in recipes if recipe not in alike]
        found: list[Seen] = []
        for group, steps in ((alike, self._few_steps), (others, None)):
            if group:
                workload = self._workload(Rung.SCREENED, steps)
                found += self._measure(group, workload, Rung.SCREENED, judges=False)
        return found

    def judge(self, recipes: Sequence[Recipe]) -> list[Seen]:
        return self._measure(recipes, self._workload(Rung.JUDGED), Rung.JUDGED, judges=True)

    def prove(self, recipes: Sequence[Recipe]) -> list[Seen]:
        found = self._measure(recipes, self._workload(Rung.PROVEN), Rung.PROVEN, judges=self.judges)
        return [one for one in found if one.rung is Rung.PROVEN]

    def seconds_of_trial(self, recipe: Recipe) -> float:
        """Return about how long a screening takes, compiling included."""
        return self.pace.of_trial(recipe)

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float:
        """Return about how long it takes to screen recipes beside the baseline, and to judge the better half."""
        judging = 0.5 if self.judges else 0.0
        return (1 + judging) * sum(self.pace.of_trial(recipe) for recipe in (Recipe(), *recipes))

    def seconds_of_final(self, finalists: Sequence[Seen]) -> float:
        """Return an estimate of how long the final takes."""
        return self.pace.of_final(finalists, _FINAL_ROUNDS, self._final_images)

    def history(self) -> tuple[list[Seen], Source]:
        """Return what the store knows of this model: results of the same search, and figures of other runs."""
        results: list[Seen] = []
        others: list[Datum] = []
        with Store.create(self.store) as store:
            for run in store.runs():
                records = comparable([store.record(key) for key in run.keys], run.rounds)
                if not records or not records[0].trial.recipe.is_baseline:
                    continue
                trial, environment = records[0].trial, records[0].environment
                if trial.model != self.found.model or trial.device != self.environment.device:
                    continue
                rung, steps = self._rung_of(trial.workload, run.rounds)
                is_here = environment.model_copy(update={"place": None}) == self.environment
                rows = rows_of(records, store.quality_pass(run), self.wanted.limits)
                for row in rows:
                    one = self.judged_by.counted(
                        seen_of(row, rows[0], rung or Rung.SCREENED, self.wanted, steps, self._final_prompts),
                        run,
                    )
                    if one is None:
                        continue
                    if one.rung is Rung.PROVEN and one.is_measured:
                        if self.judges and one.gate is None:
                            continue  # of a final that was interrupted
                        if len(row.record.rounds) < _FINAL_ROUNDS:
                            one = replace(one, rung=Rung.JUDGED if self.judges else Rung.SCREENED)
                    if is_here and rung is not None:
                        results.append(one)
                    elif one.gain is not None and not one.recipe.is_baseline:
                        error = _OTHER_WORKLOAD if is_here else _OTHER_MACHINE
                        others.append(Datum(one.recipe, one.gain, error))
        self._known |= latest(results)
        return results, Source("this store", tuple(others))

    @property
    def rounds_asked(self) -> int:
        """Of each recipe in the final."""
        return _FINAL_ROUNDS

    @property
    def _final_images(self) -> int:
        return len(self.prompts) * self.seeds if self.judges else 0

    @property
    def _final_prompts(self) -> float:
        return len(self.prompts) * math.sqrt(self.seeds)

    @property
    def _steps(self) -> int:
        return self.full.num_inference_steps

    @property
    def full(self) -> Workload:
        """What the final draws."""
        return workload_of(self.found, self._workload(Rung.PROVEN), self.asked.batch)

    @property
    def task(self) -> Task:
        """What is drawn from."""
        return self.full.task

    @property
    def _few_steps(self) -> int | None:
        """The steps of a short call; None if the model has too few to leave any out."""
        few = max(_FEWEST_STEPS, self._steps // 4)
        return few if few < self._steps else None

    def _workload(self, rung: Rung, steps: int | None = None) -> AskedWorkload:
        number = {Rung.SCREENED: 1, Rung.JUDGED: MIN_GROUPS, Rung.PROVEN: len(self.prompts)}[rung]
        if not self.judges:
            number = 1
        seeds = self.seeds if rung is Rung.PROVEN and self.judges else 1
        return self.asked.of(self.prompts[:number], steps, seeds)

    def _timing(self, rung: Rung, recipes: Sequence[Recipe] = ()) -> Timing:
        rounds, repeats = {
            Rung.SCREENED: (1, SCREENING),
            Rung.JUDGED: (1, 4),
            Rung.PROVEN: (_FINAL_ROUNDS, self.pace.repeats),
        }[rung]
        return Timing(
            rounds=rounds,
            repeats=repeats,
            max_warmup=WARM_UP,
            timeout_s=self.timeout_s if rung is Rung.PROVEN else self._timeout_s(recipes),
            threads=self.threads,
        )

    def _timeout_s(self, recipes: Sequence[Recipe]) -> float:
        """Return the timeout of a round before the final: a recipe that hangs must not take the whole search's time."""
        if self.ends_at is None:
            return self.timeout_s
        expected = max(map(self.pace.of_trial, (Recipe(), *recipes)))  # the baseline has a round, too
        return min(self.timeout_s, max(_LEAST_TIMEOUT_S, MOST_OF_THE_TIME * self.total_s, _LATE * expected))

    def _measure(
        self, recipes: Sequence[Recipe], workload: AskedWorkload, rung: Rung, judges: bool
    ) -> list[Seen]:
        timing = self._timing(rung, recipes)
        rows = self._rows(recipes, workload, timing, judges, self._deadline(recipes, rung))
        if not rows:  # the time ended before the baseline's round
            self.left_out = tuple(recipes) if rung is Rung.PROVEN else ()
            return []
        left = self._left_of(workload) if rung is Rung.SCREENED else 0.0
        found = []
        baseline = rows[0]
        for row in rows:
            if row.is_baseline:
                baseline = row
            one = seen_of(row, baseline, rung, self.wanted, left, self._final_prompts)
            if one is not None:
                found.append(one)
                self._known[one.recipe] = one
        self.pace.learn(found)
        if rung is Rung.PROVEN:
            measured = {one.recipe for one in found}
            self.left_out = tuple(recipe for recipe in recipes if recipe not in measured)
        return found

    def _deadline(self, recipes: Sequence[Recipe], rung: Rung) -> Deadline | None:
        """Return when a comparison has to end: the final with the search, what precedes it in time for a short final.

        Recipes that were not measured before are expected to be as slow as the baseline.
        """
        if self.ends_at is None:
            return None
        trials = (Recipe(), *recipes)
        if rung is not Rung.PROVEN:
            until = self.ends_at - self.pace.of_final(
                [Seen(Recipe(), Outcome.MEASURED, rung)], 1, self._final_images
            )
            each = [self.pace.of_trial(recipe) for recipe in trials]
            return Deadline(until, until, each, each)
        known = [self._known.get(recipe) for recipe in trials]
        return Deadline(
            self.ends_at - self.pace.of_quality(len(trials), self._final_images),
            self.ends_at + _GRACE * self.total_s,
            [self.pace.of_final_round(one, self._final_images) for one in known],
            [self.pace.of_final_round(one, 0) for one in known],
        )

    def _left_of(self, workload: AskedWorkload) -> float:
        """Return the steps that a workload leaves out over its own."""
        steps = workload.num_inference_steps
        return 0.0 if steps is None else self._steps / steps - 1

    def _rows(
        self,
        recipes: Sequence[Recipe],
        workload: AskedWorkload,
        timing: Timing,
        judges: bool,
        deadline: Deadline | None = None,
    ) -> list[Row]:
        """Run a comparison; with several GPUs each has its own baseline, which precedes its rows."""
        study = Study(
            models=(self.model,),
            recipes=(BASELINE, *(recipe.text for recipe in recipes)),
            workload=workload,
            timing=timing,
            quality=self.judged_by.asked(judges),
            device=self.device,
            rivals=False,
        )
        started = time.monotonic()
        spread = self.gpus if timing.rounds == 1 and len(recipes) > 1 else None
        run = run_study(
            study,
            store=self.store,
            progress=Listening(self.progress, self.pace),
            command=self.command,
            launcher=self.launcher,
            gpus=spread,
            deadline=None if spread is not None else deadline,
        )
        rows = [row for compared in run.comparisons for row in compared.rows(self.wanted.limits)]
        calls = sum(s.total_s for row in rows for r in row.record.rounds for s in r.samples) + sum(
            sum(r.warmup_s) for row in rows for r in row.record.rounds
        )
        if not judges and all(row.record.outcome is not Outcome.TIMED_OUT for row in rows):
            self.pace.note(calls, sum(len(row.record.rounds) for row in rows), time.monotonic() - started)
        if timing.rounds > 1 and rows:
            self.last = run.comparisons[0]
        return rows

    def _rung_of(self, workload: Workload, rounds: int | None) -> tuple[Rung | None, float]:
        """Return at which rung a comparison was measured, None for none, and the steps it left out over its own."""
        number = rounds or 1
        if number >= self._timing(Rung.PROVEN).rounds:
            for seeds in (1, MOST_SEEDS):
                asked = self._workload(Rung.PROVEN).model_copy(update={"num_seeds": seeds})
                if workload == workload_of(self.found, asked, self.asked.batch):
                    return Rung.PROVEN, 0.0
        judged: list[tuple[Rung, int | None]] = [(Rung.JUDGED, None)] if self.judges else []
        for rung, steps in (*judged, (Rung.SCREENED, None), (Rung.SCREENED, self._few_steps)):
            if workload == workload_of(self.found, self._workload(rung, steps), self.asked.batch):
                return rung, 0.0 if steps is None else self._steps / steps - 1
        return None, 0.0

    def _predict(self, recipes: Sequence[Recipe]) -> list[float | None]:
        trials = [
            Trial(
                model=self.found.model,
                recipe=recipe.spec,
                workload=self.full,
                device=self.environment.device,
            )
            for recipe in recipes
        ]
        return predict_by_worker(trials, self.environment, self.launcher)

    _supported: set[Recipe] = field(default_factory=set, repr=False)
    _known: dict[Recipe, Seen] = field(default_factory=dict, repr=False)

    def is_unclear(self, found: Sequence[Seen]) -> bool:
        """Whether more images could decide on a finalist."""
        return self.seeds < MOST_SEEDS and any(one.gate is Gate.UNCLEAR for one in found)
