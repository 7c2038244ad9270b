"""A dry run of `vivace tune` for one H200, without a GPU: what would it try, in which order, and does the time suffice?

    python -m benchmarks.tuner_simulated flux-dev --minutes 8
    python -m benchmarks.tuner_simulated sdxl --minutes 8 --max-memory 8GB
    python -m benchmarks.tuner_simulated sdxl --busy 0.44

The space, the search, its knowledge and its estimates of time are those of `vivace tune`. The machine answers from what
vivace's own records say, by the same kind of model that the search has, with another error of each recipe for each
seed; so the speed of a recipe that no record has is a guess. First calls are as long as on a machine that has compiled
nothing. Memory is what `vivace plan` predicts.

With `--busy` the host is slower than the records' was: the GPU is busy in that share of the baseline's time and waits
in the rest. Launching a recipe's kernels takes as long as the baseline's, half of it compiled, nothing captured; a
recipe takes that, or what its kernels take, whichever is longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import click
import numpy as np

from benchmarks.command import run
from vivace.benchmark.rounds.support import Refused, pipeline_without_weights, why_refused
from vivace.errors import VivaceError
from vivace.evidence.recorded import recorded_figures
from vivace.foundation.spec.arguments import parse_bytes
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.trial import Trial
from vivace.machinery.technique import COMPONENTS, Machine, Placement, Request, Target, Technique, Trait
from vivace.models.find import find_model
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict_trial
from vivace.runtime.workloads import workload_of
from vivace.tuning.model.by_model import ModelSampler, captures
from vivace.tuning.model.peaks import Peaks, recorded
from vivace.tuning.model.priors import effects, known_sources, measured_elsewhere
from vivace.tuning.model.regression import Regression, merged
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.pace import WARM_UP, Pace, typical_compile_s
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.search import Search
from vivace.tuning.search.space import Space, fit_targets
from vivace.tuning.search.timetable import Budget
from vivace.tuning.settings import ImageRequest

_MISSING = frozenset({"flash_attn_interface", "flash_attn.cute", "sageattention", "xformers", "mslk"})
_STARTING_S, _LOADING_S = 45.0, 2.5
_COMPILES_LONGER = 1.3  # than the search expects of this model
_CACHED = 0.2  # of a first call, where the compiler's cache has the code
_SIZES = {"flux-dev": (1024, 28), "sdxl": (1024, 50)}
_OFF = 0.015  # standard deviation of what a recipe's gain differs from what records let expect
_COMPILED_LAUNCHES = 0.5  # of the time that the host needs to launch the kernels of code that is not compiled
_KERNELS_S = 8.0  # Triton's first compilation of vivace's own kernels


class H200(Machine):
    """The GPU of the records, with the packages that were installed there."""

    def has_package(self, name: str) -> bool:
        return name not in _MISSING


@dataclass
class Simulated:
    """A `Measurer` and a clock: what is measured takes as long as it would."""

    model: str
    objective: Objective
    rng: np.random.Generator
    now: float = _STARTING_S
    pace: Pace = field(default_factory=lambda: Pace(on_gpu=True))
    useless: set[Recipe] = field(default_factory=set)
    reasons: dict[Recipe, Refused | None] = field(default_factory=dict)
    combined: frozenset[Technique] = frozenset()
    rounds: int = 2
    busy: float = 1.0

    def __post_init__(self) -> None:
        self.peaks = Peaks(self._predict)
        self.name = self.model.removeprefix("synthetic:")
        self.pace.reported_s = typical_compile_s(self.name)
        self.size, self.steps = _SIZES[self.name]
        figures = recorded_figures(self.name, "baseline", self.size, self.size, self.steps)
        assert figures is not None
        self.rest_s, self.step_s = figures.rest_s / self.busy, figures.step_s / self.busy
        self.machine = H200("cuda", "NVIDIA H200", (9, 0), "c++", num_gpus=1)
        pipe, facts = pipeline_without_weights(self.model, None, "cuda")
        self.target = Target(
            Placement(self.machine), pipe, facts, Request(prompts=("a red circle",), batch=1)
        )
        self.located = find_model(self.model)
        self.workload = workload_of(
            self.located, ImageRequest().of(PROMPT_SETS[self.located.prompt_set][:1]), 1
        )
        sources = known_sources(self.model, "NVIDIA H200", self.objective)
        self.world = Regression(effects(Space.of(self.objective).options, self.stages, self.objective))
        self.world.learn(merged([datum for source in sources for datum in source.data]))
        self.offsets: dict[Recipe, float] = {}
        self.compiled: set[object] = set()

    @property
    def stages(self) -> dict[str, float]:
        return {
            "steps": self.steps * self.step_s,
            "vae": 0.6 * self.rest_s,
            "text": 0.2 * self.rest_s,
            "other": 0,
        }

    @property
    def full_s(self) -> float:
        return self.rest_s + self.steps * self.step_s

    @property
    def few_s(self) -> float:
        return self.rest_s + max(4, self.steps // 4) * self.step_s

    def seconds_of_final(self, finalists: Sequence[Result]) -> float:
        return self.pace.of_final(finalists, self.rounds, 0)

    def seconds_of_rounds(self, finalists: Sequence[Result]) -> float:
        return self.seconds_of_final(finalists)

    def seconds_of_images(self, finalists: Sequence[Result]) -> float:
        raise AssertionError("random weights are not judged")

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float:
        return sum(self.pace.of_trial(recipe) for recipe in (Recipe(), *recipes))

    def start(self) -> Result:
        self.pace.base_s, self.pace.few_s = self.full_s, self.few_s
        self._round(Recipe(), self.few_s, 3)
        return dataclasses.replace(self._result(Recipe(), Rung.SCREENED, self.few_s), gain=0.0)

    def why_not(self, technique: Technique) -> str | None:
        refused = self._refused(Recipe((technique,)))
        return None if refused is None or technique in self.combined else refused.reason

    def needs_others(self, technique: Technique) -> bool:
        """Whether the model as it is does not allow a technique; with others it may work."""
        refused = self._refused(Recipe((technique,)))
        return refused is not None and refused.by_model

    def _refused(self, recipe: Recipe) -> Refused | None:
        if recipe not in self.reasons:
            build = partial(pipeline_without_weights, self.model, None, "cuda")
            self.reasons[recipe] = why_refused(recipe, self.target, build)
        return self.reasons[recipe]

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        refused_results: list[Result] = []
        peaks = dict(zip(recipes, self.peaks.least(recipes), strict=True)) if self.limits_memory else {}
        for recipe in recipes:
            refused = self._refused(recipe)
            limit = self.objective.max_memory_bytes
            if refused is not None:
                refused_results.append(
                    Result(recipe, Outcome.UNSUPPORTED, Rung.SCREENED, reason=refused.reason)
                )
            elif limit is not None and (peak := peaks[recipe]) is not None and peak > limit:
                refused_results.append(
                    Result(recipe, Outcome.OUT_OF_MEMORY, Rung.SCREENED, reason=f"{peak / 1e9:.1f} GB")
                )
            self._say(
                f"refused {recipe.text}: {refused_results[-1].reason}"
                if refused_results and refused_results[-1].recipe is recipe
                else None
            )
        return refused_results

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        self._round(Recipe(), self.few_s, 3)
        results = []
        for recipe in recipes:
            if recipe in self.useless:
                self.now += 2 * _LOADING_S
                self._say(f"no effect, or does not work: {recipe.text}")
                results.append(Result(recipe, Outcome.NO_EFFECT, Rung.SCREENED, reason="no effect"))
                continue
            first_s = self._round(recipe, self.few_s / math.exp(self.gain(recipe)), 3)
            results.append(self._result(recipe, Rung.SCREENED, first_s))
        self.pace.learn(results)
        return results

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        raise AssertionError("random weights are not judged")

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        raise AssertionError("random weights are not judged")

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        firsts = {}
        for _ in range(self.rounds):
            for recipe in (Recipe(), *recipes):
                seconds = self.full_s / math.exp(self.gain(recipe))
                firsts[recipe] = self._round(recipe, seconds, self.pace.repeats)
        return [self._result(recipe, Rung.FINAL, firsts[recipe]) for recipe in (Recipe(), *recipes)]

    def gain(self, recipe: Recipe) -> float:
        return -math.log(max(self._busy_s(recipe), self._launching_s(recipe)))

    def _busy_s(self, recipe: Recipe) -> float:
        """Return how long the GPU computes, in shares of the baseline's time."""
        return self.busy / math.exp(self._recorded_gain(recipe))

    def _launching_s(self, recipe: Recipe) -> float:
        """Return how long the host launches, in shares of the baseline's time."""
        if self.busy == 1.0 or captures(recipe):
            return 0.0
        is_compiled = any(Trait.COMPILED in technique.facts.provides for technique in recipe)
        return _COMPILED_LAUNCHES if is_compiled else 1.0

    def _recorded_gain(self, recipe: Recipe) -> float:
        if recipe.is_baseline:
            return 0.0
        if recipe not in self.offsets:
            self.offsets[recipe] = _OFF * float(self.rng.standard_normal())
        exact = any(datum.recipe == recipe and datum.error <= 0.05 for datum in self.world.data)
        return float(self.world.estimate([recipe])[0][0]) + (0.0 if exact else self.offsets[recipe])

    def _round(self, recipe: Recipe, call_s: float, repeats: int) -> float:
        cold = Pace(on_gpu=True, reported_s=self.pace.reported_s)
        compiling_s = _COMPILES_LONGER * cold.of_compiling(recipe)
        key = frozenset(t for t in recipe if Trait.COMPILED in t.facts.provides or t.name == "quantize")
        if compiling_s and key in self.compiled:
            compiling_s *= _CACHED
        if any(Trait.FUSED in technique.facts.provides for technique in recipe):
            compiling_s += 2 if Trait.FUSED in self.compiled else _KERNELS_S
            self.compiled.add(Trait.FUSED)
        self.compiled.add(key)
        overhead = _LOADING_S + (3.0 if not recipe.is_baseline else 0.0)
        calls_s = compiling_s + (repeats + WARM_UP) * call_s
        self.pace.note(calls_s, 1, calls_s + overhead)
        self.now += overhead + calls_s
        self._say(f"{repeats} x {call_s:5.2f} s, first call {call_s + compiling_s:5.1f} s  {recipe.text}")
        return call_s + compiling_s

    def _result(self, recipe: Recipe, rung: Rung, first_s: float) -> Result:
        gain = self.gain(recipe)
        seconds = self.full_s / math.exp(gain)
        peak = self._peak(recipe)
        result = Result(recipe, Outcome.MEASURED, rung, gain, 0.02, seconds=seconds)
        busy = self._busy_s(recipe) * math.exp(gain)
        stages = tuple(self.stages.items()) if recipe.is_baseline else ()
        return dataclasses.replace(
            result, peak_bytes=peak, first_call_s=first_s, busy_share=busy, stages_s=stages
        )

    @property
    def limits_memory(self) -> bool:
        return self.objective.max_memory_bytes is not None or self.objective.measures_memory

    def _peak(self, recipe: Recipe) -> float | None:
        """Return what would be measured: a record's, the prediction, or the least that is known, and a tenth."""
        if not self.limits_memory:
            return 1.0
        recorded = recorded_figures(self.name, recipe.text, self.size, self.size, self.steps)
        if recorded is not None:
            return float(recorded.peak_bytes)
        (least,) = self.peaks.least([recipe])
        exact = self.peaks.of(recipe)
        return exact if exact is not None or least is None else 1.1 * least

    def _predict(self, recipes: Sequence[Recipe]) -> list[float | None]:
        peaks: list[float | None] = []
        for recipe in recipes:
            trial = Trial(model=self.located.model, recipe=recipe.spec, workload=self.workload, device="cuda")
            try:
                peaks.append(float(predict_trial(trial, self.machine).peak_bytes))
            except VivaceError as error:
                if "cannot be predicted" not in str(error):
                    self.useless.add(recipe)  # it does not work here, or does nothing
                peaks.append(None)
            self.now += 1.0
        return peaks

    def _say(self, text: str | None) -> None:
        if text is not None:
            click.echo(f"{self.now:6.0f} s  {text}")


@click.command()
@click.argument("model", type=click.Choice(list(_SIZES)))
@click.option("--minutes", type=float, default=8.0, show_default=True)
@click.option("--max-memory", default=None)
@click.option("--busy", type=click.FloatRange(0.05, 1), default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def simulated(model: str, minutes: float, max_memory: str | None, busy: float, seed: int) -> int:
    """Run a search of random weights on a simulated H200, and print what it does when."""
    objective = Objective(
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory), same_picture_only=True
    )
    gpu = Simulated(f"synthetic:{model}", objective, np.random.default_rng(seed), busy=busy)
    sources = known_sources(f"synthetic:{model}", "NVIDIA H200", objective)
    components = frozenset(gpu.target.modules(COMPONENTS))
    fitted_techniques = [fit_targets(technique, components) for technique in measured_elsewhere(sources)]
    gpu.combined = frozenset(technique for technique in fitted_techniques if gpu.needs_others(technique))
    space = Space.of(objective, gpu.why_not, fitted_techniques, judges=False, components=components)
    space.combined = gpu.combined
    click.echo(f"{len(space.options)} options, {len(space.cut)} left out")
    if max_memory is not None:
        saving = [text for option in space.options for text in option.facts.saves_memory]
        gpu.peaks.ask([Recipe(), *map(resolve, dict.fromkeys(saving))])
        gpu.peaks.add(recorded(model, gpu.size, gpu.size))
    base = gpu.start()
    budget = Budget(minutes=minutes, timetable=gpu, started=0.0, clock=lambda: gpu.now)
    sampler = ModelSampler(
        space, np.random.default_rng(seed), sources, effects(space.options, gpu.stages, objective),
        seconds_of=gpu.pace.of_trial, most_s=lambda: budget.most_s, peaks=gpu.peaks.predicted,
    )  # fmt: skip
    search = Search(objective, space, sampler, gpu, budget, judges=False, history=[base])
    pick = search.run()
    if pick is None:
        click.echo("no pick")
        return 1
    click.echo(f"pick {pick.recipe.text}: {pick.seconds:.2f} s, baseline {gpu.full_s:.2f} s")
    click.echo(f"{search.num_trials} trials, {gpu.now:.0f} s of {60 * minutes:.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(simulated))
