"""Measure recipes with the benchmark: each rung of the search is a comparison with the baseline, kept in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vivace.answers.formatting import size
from vivace.benchmark import Study, Timing, WorkloadRequest, run_study
from vivace.benchmark.progress import Deadline, Forwarding
from vivace.benchmark.rounds.support import ask_support
from vivace.benchmark.rounds.work import predict_by_worker
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.store.compared import Invocation, Purpose
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import Task, Workload
from vivace.foundation.stats import MIN_GROUPS
from vivace.models.find import SYNTHETIC, LocatedModel
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row
from vivace.runtime.workloads import workload_of
from vivace.tuning.final.finals import Finals, ImagePlan, needs_floor
from vivace.tuning.final.judge import QualityJudge
from vivace.tuning.model.peaks import Peaks
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.pace import SCREENING, WARM_UP, Pace, typical_compile_s
from vivace.tuning.search.results import Result, Rung, recipe_of, result_of_row
from vivace.tuning.search.timetable import FINAL_ROUNDS, Timetable
from vivace.tuning.settings import ImageRequest

_FEWEST_STEPS = 4
_PURPOSES = {Rung.SCREENED: Purpose.SCREENING, Rung.JUDGED: Purpose.JUDGEMENT, Rung.FINAL: Purpose.FINAL}
RUNGS = {purpose: rung for rung, purpose in _PURPOSES.items()} | {Purpose.BASELINE: Rung.SCREENED}


@dataclass
class Bench:
    """A `Measurer` on this machine.

    Attributes:
        prompts: all prompts of the final.
        judges: whether images are compared with the baseline's, by `judged_by`.
        run: the store, the places and the launcher.
        timing: the time limit of a round, and the threads.
        time: when the parts of the search have to end.
        finals: comparisons of finalists with the baseline, with all images that were drawn of them.
        left_out: finalists that the last final had no time for.
        peaks: predictions of `vivace plan`.
        pace: estimates of the times of measurements.
    """

    model: str
    located: LocatedModel
    objective: Objective
    request: ImageRequest
    prompts: tuple[str, ...]
    judges: bool
    run: RunSettings
    environment: Environment
    device: str
    timing: Timing
    left_out: tuple[Recipe, ...] = ()
    judged_by: QualityJudge = field(default_factory=QualityJudge)
    pace: Pace = field(default_factory=lambda: Pace(on_gpu=False))

    def __post_init__(self) -> None:
        self.peaks = Peaks(self._predict)
        self.pace.on_gpu = self.environment.device != "cpu"
        self.pace.reported_s = typical_compile_s(self.model.removeprefix(SYNTHETIC))
        asks_variety = self.objective.limits.variety is not None and not self.objective.same_picture_only
        self.plan = ImagePlan.of(self.located, self.request, self.prompts, seeds=2 if asks_variety else 1)
        self.time = Timetable(self.pace, self.plan, self.judges)
        further = [workload_of(self.located, batch, self.request.batch) for batch in self.plan.batches[1:]]
        self.finals = Finals(
            self.plan,
            tuple(further) if self.judges else (),
            self.run.folder,
            self.objective.limits,
            self.time.looks,
        )

    def start(self) -> Result | None:
        """Measure the baseline alone; None if it fails. Its stages bound the gains of techniques.

        Few steps suffice where only techniques are searched that keep the image: full ones are not screened.
        """
        steps = self._few_steps if self.objective.same_picture_only else None
        workload, timing = self._workload(Rung.SCREENED, steps), self._timing(Rung.SCREENED)
        row = self._rows((), workload, timing, Purpose.BASELINE, judges=False)[0]
        base = result_of_row(row, row, Rung.SCREENED, self.objective, self._left_of(workload))
        if base is not None and base.seconds:
            batch, few = self.request.batch, self._few_steps
            denoising = dict(base.stages_s).get("steps", 0.0) * (1 if steps is None else self._steps / steps)
            left = 0.0 if few is None else denoising * (1 - few / self._steps)
            self.pace.batch, self.pace.base_s = batch, batch * base.seconds
            self.pace.few_s = None if few is None else batch * (base.seconds - left)
        return base

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Return refusals: by techniques on the model without weights, and by predicted memory."""
        texts = [recipe.text for recipe in recipes if recipe not in self._supported]
        reasons: dict[str, str] = {}
        if texts:
            support = ask_support(
                self.launcher, self.model, texts, self.device, self.task, self.request.batch
            )
            reasons = support.refusals(recipes, self.objective.keeps)
        self._supported |= {recipe for recipe in recipes if recipe.text not in reasons}
        refused = [
            Result(recipe, Outcome.UNSUPPORTED, Rung.SCREENED, reason=reasons[recipe.text])
            for recipe in recipes
            if recipe.text in reasons
        ]
        limit = self.objective.max_memory_bytes
        if limit is not None and self.environment.device == "cuda":
            left = [recipe for recipe in recipes if recipe.text not in reasons]
            for recipe, peak in zip(left, self.peaks.least(left), strict=True):
                if peak is not None and peak > limit:
                    why = f"`vivace plan` predicts a peak of {size(peak)}, more than {size(limit)}"
                    refused.append(Result(recipe, Outcome.OUT_OF_MEMORY, Rung.SCREENED, reason=why))
        return refused

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Measure recipes that keep the image over few steps, since their steps are alike; others over all steps."""
        alike = [recipe for recipe in recipes if recipe.same_picture and self._few_steps is not None]
        others = [recipe for recipe in recipes if recipe not in alike]
        results: list[Result] = []
        for group, steps in ((alike, self._few_steps), (others, None)):
            if group:
                workload = self._workload(Rung.SCREENED, steps)
                results += self._measure(group, workload, Rung.SCREENED, judges=False)
        return results

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._measure(recipes, self._workload(Rung.JUDGED), Rung.JUDGED, judges=True)

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._measure(recipes, self._workload(Rung.FINAL), Rung.FINAL, judges=self.judges)

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        """Draw images of the recipes with the fewest images first."""
        looks = {recipe: self.time.looks.get(recipe, 1) for recipe in recipes}
        look = min(looks.values())
        if look >= len(self.plan.batches):
            return []
        chosen = [recipe for recipe in recipes if looks[recipe] == look]
        timing = self.timing.model_copy(update={"rounds": 1, "repeats": 1, "max_warmup": 1})
        self._rows(
            chosen,
            self.plan.batches[look],
            timing,
            Purpose.IMAGES,
            self.time.deadline_of_images(chosen, look),
        )
        self.finals.read()
        return [
            result
            for recipe in chosen
            if self.time.looks.get(recipe, 1) > look
            for result in self._seen(self.finals.rows(recipe), Rung.FINAL, 0.0)
            if result.recipe == recipe
        ]

    @property
    def launcher(self) -> Launcher:
        """The launcher of all rounds."""
        assert self.run.launcher is not None
        return self.run.launcher

    @property
    def command(self) -> str:
        """The command line of the search."""
        assert self.run.command is not None
        return self.run.command

    @property
    def _steps(self) -> int:
        return self.full.num_inference_steps

    @property
    def full(self) -> Workload:
        """The workload of the final."""
        return workload_of(self.located, self._workload(Rung.FINAL), self.request.batch)

    @property
    def task(self) -> Task:
        """The task of the images."""
        return self.full.task

    @property
    def _few_steps(self) -> int | None:
        """The steps of a short call; None if the model has too few to leave any out."""
        few = max(_FEWEST_STEPS, self._steps // 4)
        return few if few < self._steps else None

    def _workload(self, rung: Rung, steps: int | None = None) -> WorkloadRequest:
        number = {Rung.SCREENED: 1, Rung.JUDGED: MIN_GROUPS, Rung.FINAL: len(self.prompts)}[rung]
        if rung is Rung.FINAL and self.judges:
            return self.plan.batches[0]
        return self.request.of(self.prompts[: number if self.judges else 1], steps)

    def _timing(self, rung: Rung, recipes: Sequence[Recipe] = ()) -> Timing:
        rounds, repeats = {
            Rung.SCREENED: (1, SCREENING),
            Rung.JUDGED: (1, 4),
            Rung.FINAL: (self._final_rounds(recipes), self.pace.repeats),
        }[rung]
        usual_s = self.timing.timeout_s
        return Timing(
            rounds=rounds,
            repeats=repeats,
            max_warmup=WARM_UP,
            timeout_s=usual_s if rung is Rung.FINAL else self.time.timeout_s(recipes, usual_s),
            threads=self.timing.threads,
        )

    def _final_rounds(self, recipes: Sequence[Recipe]) -> int:
        """Return the number of rounds of a final, which grows if all its recipes have been in one before."""
        earlier = [self._rounds.get(recipe, 0) for recipe in recipes]
        return FINAL_ROUNDS + (max(earlier) if earlier and all(earlier) else 0)

    def _measure(
        self, recipes: Sequence[Recipe], workload: WorkloadRequest, rung: Rung, judges: bool
    ) -> list[Result]:
        timing = self._timing(rung, recipes)

        def measure(*, draws_floor: bool = False) -> list[Row]:
            deadline = self.time.deadline(recipes, rung)
            purpose = _PURPOSES[rung]
            return self._rows(
                recipes, workload, timing, purpose, deadline, judges=judges, draws_floor=draws_floor
            )

        rows = measure()
        if not rows:  # the time ended before the baseline's round
            self.left_out = tuple(recipes) if rung is Rung.FINAL else ()
            return []
        if rung is Rung.FINAL:
            rows = self.finals.add(self._compared)
            if needs_floor(rows):
                measure(draws_floor=True)
                rows = self.finals.add(self._compared)
        results = self._seen(rows, rung, self._left_of(workload) if rung is Rung.SCREENED else 0.0)
        self.pace.learn(results)
        if rows[0].latency is not None and workload.num_inference_steps is None:
            # How long the baseline takes now, since other programs come and go.
            self.pace.base_s = self.request.batch * rows[0].latency.median.point
        if rung is Rung.FINAL:
            measured = {result.recipe for result in results}
            self._rounds |= {
                recipe: len(row.record.rounds)
                for row in rows
                if (recipe := recipe_of(row.record)) is not None and row.latency is not None
            }
            self.left_out = tuple(recipe for recipe in recipes if recipe not in measured)
        return results

    def _seen(self, rows: Sequence[Row], rung: Rung, steps_left: float) -> list[Result]:
        results, baseline = [], rows[0]
        for row in rows:
            baseline = row if row.is_baseline else baseline
            results.append(self.result_of(row, baseline, rung, steps_left))
        readable = [result for result in results if result is not None]
        self.time.note(readable)
        return readable

    def result_of(self, row: Row, baseline: Row, rung: Rung, steps_left: float) -> Result | None:
        """Return the result of a row. A final of one round proves nothing and counts as a judgement."""
        recipe = recipe_of(row.record)
        if recipe is None:
            return None
        prompts = self.time.prompts_to_come(rung, recipe)
        result = result_of_row(row, baseline, rung, self.objective, steps_left, prompts, self.plan.sure)
        is_short = rung is Rung.FINAL and len(row.record.rounds) < FINAL_ROUNDS
        if result is None or not result.is_measured or not is_short:
            return result
        return replace(result, rung=Rung.JUDGED if self.judges else Rung.SCREENED)

    def _left_of(self, workload: WorkloadRequest) -> float:
        """Return the steps that a workload leaves out over its own."""
        steps = workload.num_inference_steps
        return 0.0 if steps is None else self._steps / steps - 1

    def _rows(
        self,
        recipes: Sequence[Recipe],
        workload: WorkloadRequest,
        timing: Timing,
        purpose: Purpose,
        deadline: Deadline | None = None,
        *,
        judges: bool = True,
        draws_floor: bool = False,
    ) -> list[Row]:
        """Run a comparison; with several GPUs each has its own baseline, which precedes its rows."""
        study = Study(
            models=(self.model,),
            recipes=(BASELINE, *(recipe.text for recipe in recipes)),
            workload=workload,
            timing=timing,
            quality=self.judged_by.quality_request(judges, noise_floor=draws_floor),
            device=self.device,
            rivals=False,
        )
        started = time.monotonic()
        spread = self.run.gpus if timing.rounds == 1 and len(recipes) > 1 else None
        settings = replace(
            self.run,
            progress=TimedQualityPasses(self.run.progress, self.pace),
            gpus=spread,
            purpose=purpose,
            deadline=None if spread is not None else deadline,
        )
        run = run_study(study, settings)
        rows = [row for compared in run.comparisons for row in compared.rows(self.objective.limits)]
        calls = sum(s.total_s for row in rows for r in row.record.rounds for s in r.samples) + sum(
            sum(r.warmup_s) for row in rows for r in row.record.rounds
        )
        if not judges and all(row.record.outcome is not Outcome.TIMED_OUT for row in rows):
            self.pace.note(calls, sum(len(row.record.rounds) for row in rows), time.monotonic() - started)
        self._compared = run.comparisons[0]
        return rows

    def rung_of(self, run: Invocation, workload: Workload) -> tuple[Rung | None, float]:
        """Return the rung of this search that a stored run measured, None for none, and the steps that it left out."""
        rung = RUNGS.get(run.purpose)
        if rung is None or (rung is Rung.JUDGED and not self.judges):
            return None, 0.0
        is_short = rung is Rung.SCREENED and workload.num_inference_steps == self._few_steps
        request = self._workload(rung, self._few_steps if is_short else None)
        if workload != workload_of(self.located, request, self.request.batch):
            return None, 0.0
        return rung, self._left_of(request)

    def _predict(self, recipes: Sequence[Recipe]) -> list[float | None]:
        trials = [
            Trial(
                model=self.located.model,
                recipe=recipe.spec,
                workload=self.full,
                device=self.environment.device,
            )
            for recipe in recipes
        ]
        return predict_by_worker(trials, self.environment, self.launcher)

    _rounds: dict[Recipe, int] = field(default_factory=dict, repr=False)
    _supported: set[Recipe] = field(default_factory=set, repr=False)


@dataclass
class TimedQualityPasses(Forwarding):
    """A `Progress` that passes everything on, and notes the time of quality passes."""

    pace: Pace

    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None:
        self.pace.note_quality(num_scored, num_drawn, seconds)
        self.progress.end_quality(num_scored, num_drawn, seconds)
