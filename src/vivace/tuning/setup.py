"""The start of a search: its space, and the checks of its request."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from vivace.answers.formatting import seconds, size
from vivace.benchmark.rounds.support import ask_support
from vivace.errors import Unsupported, UsageError
from vivace.machinery.technique import Technique
from vivace.models.find import SYNTHETIC
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.peaks import recorded
from vivace.tuning.search.objective import Objective
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
                "judged; leave it out"
            )
    if not objective.has_kept(recipe):
        raise UsageError(
            f"--start {text} lacks {', '.join(objective.keep)}, which --keep requires; add it to --start"
        )
    return recipe


def space_of(objective: Objective, bench: Bench, reported: Sequence[Technique] = ()) -> Space:
    """Return the space without unsupported techniques; for `reported` see `Space.of`. Unsupported if a technique to
    keep is among them."""
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
    space.combined = combined
    for technique in objective.kept:
        if (why := space.cut.get(technique.text)) is not None:
            raise Unsupported(f"--keep {technique.text}: {why}")
    for name in objective.kept_names:
        if not any(option.name == name for option in space.options):
            why = next((why for text, why in space.cut.items() if text.startswith(name)), "it has no option")
            raise Unsupported(f"--keep {name}: {why}")
    return space


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
    """Raise UsageError for minutes that do not suffice for a final; `least_s` and `likely_s` are seconds of a call of
    the baseline, while it is measured."""

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
