"""The start of a search: its space, and the checks of its request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vivace.answers.formatting import seconds, size
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import FewSteps, few_steps_of
from vivace.benchmark.rounds.support import ask_support
from vivace.benchmark.store import Store
from vivace.errors import StoreError, Unsupported, UsageError
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate
from vivace.machinery.technique import Technique
from vivace.models.find import SYNTHETIC, LocatedModel
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.schedule_search import searched_caches
from vivace.techniques.distilled import Distilled
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.peaks import recorded
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import recipe_of
from vivace.tuning.search.space import Space, fit_targets


def start_of(text: str | None, objective: Objective) -> Recipe | None:
    """Return the recipe to begin with, or raise UsageError."""
    if text is None:
        return None
    recipe = resolve(text).pinned()
    for technique in recipe:
        if technique.name in objective.without:
            raise UsageError(f"--start {text} has {technique.name}, which --without {technique.name} forbids")
        if not objective.allows(technique):
            raise UsageError(
                f"--start {text}: {technique.text} changes the image, and with random weights quality cannot be "
                "judged; add --trust-quality-of NAME, or leave it out"
            )
    if not objective.has_kept(recipe):
        raise UsageError(
            f"--start {text} lacks {', '.join(objective.keep)}, which --keep requires; add it to --start"
        )
    return recipe


def space_of(
    objective: Objective, bench: Bench, trusted: frozenset[Recipe] | None, reported: Sequence[Technique] = ()
) -> Space:
    """Return the space without unsupported techniques. For `reported` see `Space.of`.

    Raises:
        Unsupported: a technique to keep is among them.
    """
    every = Space.of(objective, reported=reported, judges=bench.judges).options
    texts = [option.text for option in every]
    support = ask_support(bench.launcher, bench.model, texts, bench.device, bench.task, bench.request.batch)
    components = support.components
    reasons = {
        fit_targets(option, components).text: why
        for option in every
        if (why := support.reasons.get(option.text))
    }
    # Combinations that records show to work on such a GPU, as fused does with CUDA graphs of SDXL's VAE.
    combined = frozenset(
        fit_targets(option, components)
        for option in every
        if option in reported and option.text in support.by_model
    )

    def why_not(technique: Technique) -> str | None:
        is_known = technique.facts.same_picture or trusted is None
        if not is_known and not any(technique in recipe.techniques for recipe in trusted or ()):
            return "no record of the trusted model keeps its quality with it"
        if (
            technique.facts.num_gpus > 1
            and bench.environment.device == "cpu"
            and not objective.keeps(technique)
        ):
            return (
                f"processes on a CPU share the cores that one process has; --keep {technique.name} tries it"
            )
        return None if technique in combined else reasons.get(technique.text)

    space = Space.of(objective, why_not, reported, bench.judges, components)
    space.trusted, space.combined = trusted, combined
    for technique in objective.kept:
        if (why := space.cut.get(technique.text)) is not None:
            raise Unsupported(f"--keep {technique.text}: {why}")
    for name in objective.kept_names:
        if not any(option.name == name for option in space.options):
            why = next((why for text, why in space.cut.items() if text.startswith(name)), "it has no option")
            raise Unsupported(f"--keep {name}: {why}")
    return space


def known_few_steps(located: LocatedModel) -> tuple[FewSteps, ...]:
    """Return the published LoRAs of few steps of a model, or of the one that random weights have the form of."""
    return few_steps_of(CATALOGUE.get(located.model.name.removeprefix(SYNTHETIC)))


def of_the_model(located: LocatedModel, num_steps: int, tell: Callable[[str], None]) -> list[Technique]:
    """Return the options that are one model's own: its LoRAs at other numbers of steps that they are made for than
    the usual one, and step caches with the schedules that `calibrate schedule` has left in the working folder."""
    loras, options = known_few_steps(located), list[Technique]()
    for lora in loras:
        usual = Distilled(kind=lora.kind).call_with(loras)["num_inference_steps"]
        most = {lora.steps[0], max(lora.steps)} - {usual}
        options += [Distilled(kind=lora.kind, steps=number) for number in sorted(most)]
    if not located.model.is_synthetic:
        for file, cache in searched_caches(located.model.name, located.model.revision, num_steps):
            tell(f"{file}: {'of another model or revision, left out' if cache is None else cache.text}")
            options += [] if cache is None else [cache]
    return options


def trusted_recipes(name: str, located: LocatedModel, store: Path, limits: Limits) -> frozenset[Recipe]:
    """Return the recipes that kept the quality of an embedded model, by the store.

    Raises:
        UsageError: it is not of the same kind, or the store has no results of it.
    """
    entry = CATALOGUE.get(name)
    mine = CATALOGUE.get(located.model.name.removeprefix(SYNTHETIC))
    if entry is None or name.startswith(SYNTHETIC):
        raise UsageError(f"--trust-quality-of {name}: give an embedded model, e.g. tiny-flux")
    if mine is not None and entry.pipeline != mine.pipeline:
        same = [e.name for e in CATALOGUE.values() if e.pipeline == mine.pipeline and e.scorer is not None]
        instead = f"; of the same kind {'is' if len(same) == 1 else 'are'} {', '.join(same)}" if same else ""
        raise UsageError(
            f"--trust-quality-of {name}: it is a {entry.pipeline}, and {located.model.name} a {mine.pipeline}{instead}"
        )
    passed: set[Recipe] = set()
    try:
        with Store.read_only(store) as opened:
            passed = {
                recipe
                for compared in opened.comparisons(repeated=True)
                if compared.records[0].trial.model.name == name
                for row in compared.rows(limits)
                if row.judgement is not None and row.judgement.gate is Gate.PASSED
                if (recipe := recipe_of(row.record)) is not None
            }
    except StoreError:
        pass
    if not passed:
        raise UsageError(
            f"--trust-quality-of {name}: the store {store} has no recipe that keeps its quality; run "
            f"`vivace tune {name}` first"
        )
    return frozenset(passed)


def check_memory(objective: Objective, bench: Bench) -> None:
    """Raise UsageError, naming the least, for a memory limit that no recipe is predicted to keep."""
    limit = objective.max_memory_bytes
    if limit is None or bench.environment.device != "cuda":
        return
    space = Space.of(objective)
    saving = [text for option in space.options for text in option.facts.saves_memory]
    recipes = [Recipe(), *(resolve(text) for text in dict.fromkeys(saving))]
    bench.peaks.ask(recipes)
    if bench.request.batch == 1:
        name = bench.model.removeprefix(SYNTHETIC)
        bench.peaks.add(recorded(name, bench.full.height, bench.full.width))
    peaks = {recipe: peak for recipe in recipes if (peak := bench.peaks.of(recipe)) is not None}
    if peaks and min(peaks.values()) > limit:
        least = min(peaks, key=lambda recipe: peaks[recipe])
        raise UsageError(
            f"--max-memory {size(limit)} cannot be met: the smallest peak that `vivace plan` predicts is "
            f"{size(peaks[least])}, with {least.text}; give --max-memory {math.ceil(peaks[least] / 1e8) / 10:g}GB"
        )


def check_minutes(
    minutes: float | None,
    bench: Bench,
    began: float,
    least_s: float | None = None,
    likely_s: float | None = None,
) -> None:
    """Refuse minutes that do not suffice for a final.

    Args:
        least_s, likely_s: seconds of a call of the baseline, while it is measured.

    Raises:
        UsageError: naming the minutes that suffice.
    """

    def needed_s(call_s: float | None) -> float:
        if call_s is not None:
            bench.pace.batch, bench.pace.base_s = bench.request.batch, call_s
        return time.monotonic() - began + bench.time.seconds_of_final([])

    if minutes is not None and needed_s(least_s) > 60 * minutes:
        needed = needed_s(likely_s)
        raise UsageError(
            f"--minutes {minutes:g} cannot be met: starting and comparing one recipe with the baseline takes about "
            f"{seconds(needed)}; give --minutes {math.ceil(needed / 30) / 2 + 0.5:g}"
        )
