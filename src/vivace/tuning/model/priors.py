"""Priors of techniques before the first trial: from their declarations, from records, and publications.

A technique can save no more than the time of the components that it works on, so the baseline's stages bound its
effect. Records of the same model on the same family of GPUs count most; those of other models or families are a hint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vivace.architectures.entry import FewSteps
from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables, community_tables
from vivace.evidence.recorded import RecordedFigures, all_recorded
from vivace.evidence.standing import has_records
from vivace.evidence.studies.published_tables import published_tables
from vivace.evidence.tables import EvidenceTable
from vivace.foundation.hardware import architecture_of
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.machinery.technique import TEXT_ENCODERS, Technique, Trait
from vivace.models.find import SYNTHETIC
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve_cached
from vivace.techniques.distilled import Distilled
from vivace.techniques.steps import Steps
from vivace.tuning.model.regression import Datum, Prior
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.space import has_searched_steps, is_recommended

_SAME, _OTHER_MODEL, _OTHER_FAMILY, _BOTH_OTHER = 0.05, 0.15, 0.2, 0.3
"""Standard errors of a recorded gain as a prediction for this model on this GPU."""
_NO_GPU = 0.2  # larger where no GPU is known: all records are of GPUs
SAME = 0.1
"""Largest error of a gain of this model: only other models' or families' measurements have a larger one."""
_MUCH_SLOWER = -0.3
"""The gain below which a combination says nothing about its parts: one part may repair what another breaks (fp32 and
tf32 on a bf16 model)."""
_NOT_THE_BASELINE = 0.1  # larger for a gain over a recipe that is not the baseline
_STAGES = {"denoiser": "steps", "vae": "vae"} | dict.fromkeys(TEXT_ENCODERS, "text")
_LARGEST_SD = 0.35
_REPLACED_SHARE = 0.3
"""The same for trained weights that replace a component, whose share of the time is measured."""
_ON_A_CPU_SD, _SAVING_ON_A_CPU_SD = 0.1, 0.2
"""For techniques that keep the image without compiling: a CPU has no launch gaps, so the same arithmetic takes about
the same time. Those that save memory compute in another precision, which some CPUs do fast."""
_TRAINED_SHARE, _LEAST_TRAINED_SD = 0.2, 0.05
"""Standard deviation of the gain of weights trained for fewer steps: as a share of the gain, and its minimum. They may
also drop guidance, and calls have overheads."""


@dataclass(frozen=True)
class PriorSource:
    """Figures of other runs in the model: their source, and their number."""

    name: str
    data: tuple[Datum, ...]


def effects(
    techniques: Iterable[Technique],
    stages_s: Mapping[str, float] | None,
    objective: Objective,
    num_steps: int | None = None,
    is_cpu: bool = False,
    few_steps: Sequence[FewSteps] = (),
) -> dict[str, Prior]:
    """Return the prior of each option's effect on the goal, by its text, and by name@component, from the baseline's
    seconds by stage and the model's LoRAs for few steps."""
    by_name = {}
    for technique in techniques:
        trained = _effect_of_training(technique, stages_s, objective, num_steps, few_steps)
        by_name[technique.text] = trained or _effect(
            technique, technique.targets, stages_s, objective, is_cpu
        )
        if has_searched_steps(technique):
            continue  # its name's effects are those without a schedule
        for component in technique.declared.targetable:
            name = f"{technique.name}@{component}"
            by_name[name] = trained or _effect(technique, (component,), stages_s, objective, is_cpu)
    return by_name


def _effect_of_training(
    technique: Technique,
    stages_s: Mapping[str, float] | None,
    objective: Objective,
    num_steps: int | None,
    few_steps: Sequence[FewSteps],
) -> Prior | None:
    """Return the effect of weights trained for fewer steps, or to replace a component, and of steps that were searched
    to be left out, by the time that they save.

    The gain of other techniques that leave work out could be counted as well. But a search that expects it tries the
    most reckless of them first, and finds less (docs/tuning.md).
    """
    if objective.measures_memory:
        return None
    steps, saved = technique.facts.trained_steps, technique.facts.saved_share
    if isinstance(technique, Distilled):
        steps = technique.call_with(few_steps).get("num_inference_steps", steps)
    elif isinstance(technique, StepCache) and has_searched_steps(technique):
        saved = technique.known_hits
    if saved is not None and stages_s:
        gain = -math.log(1 - touched_share(technique.targets, stages_s) * saved)
        return Prior(gain, _REPLACED_SHARE * gain)
    if steps is None or num_steps is None or steps >= num_steps:
        return None
    denoising = touched_share(("denoiser",), stages_s)
    gain = -math.log(1 - denoising * (1 - steps / num_steps))
    return Prior(gain, max(_LEAST_TRAINED_SD, _TRAINED_SHARE * gain))


def _effect(
    technique: Technique,
    targets: Sequence[str],
    stages_s: Mapping[str, float] | None,
    objective: Objective,
    is_cpu: bool,
) -> Prior:
    saves_memory = bool(technique.facts.saves_memory)
    if objective.measures_memory:
        return Prior(0.2, 0.3) if saves_memory else Prior(0.0, 0.08)
    reach = -math.log(1 - min(touched_share(targets, stages_s), 0.9))
    # Techniques that change the image do so to skip work. Those that save memory mostly cost time.
    mean = 0.25 if not technique.facts.same_picture else -0.15 if saves_memory else 0.0
    sd = max(0.01, min(_LARGEST_SD, 0.5 * reach))
    if not is_recommended(technique):
        mean, sd = mean - 0.08, sd / 2
    if is_cpu and technique.facts.same_picture and Trait.COMPILED not in technique.facts.provides:
        sd = min(sd, (_SAVING_ON_A_CPU_SD if saves_memory else _ON_A_CPU_SD) * min(1.0, reach))
    return Prior(mean * min(1.0, reach), sd)


def touched_share(targets: Sequence[str], stages_s: Mapping[str, float] | None) -> float:
    """Return the share of the baseline's time in the components that a technique works on; 1 if that is unknown."""
    if not targets or not stages_s:
        return 1.0
    stages = {_STAGES[component] for component in targets}
    return sum(stages_s.get(stage, 0.0) for stage in stages) / max(sum(stages_s.values()), 1e-9)


def known_sources(
    model: str, device_name: str, objective: Objective, without: Iterable[str] = (), is_cpu: bool = False
) -> tuple[PriorSource, ...]:
    """Return the gains of recipes in vivace's records, contributions and published studies, for a device.

    The records are of GPUs. A CPU compiles, rounds and multiplies differently, so it takes over only techniques that
    leave work out, which gain on any device.

    Args:
        without: sources to leave out: "records", or the number of a study, e.g. "000". A replay leaves out what it
            replays.
        is_cpu: whether the device is a CPU.
    """
    mine = architecture_of(device_name)
    if objective.measures_memory:
        return ()
    name = model.removeprefix(SYNTHETIC)
    left_out = set(without)
    sources = (
        [] if "records" in left_out else [PriorSource("vivace's records", tuple(_of_records(name, mine)))]
    )
    sources.append(PriorSource("reports of others", tuple(_of_tables(community_tables(), name, mine))))
    sources += [
        PriorSource(f"study {study}", tuple(_of_tables(published_tables([study]), name, mine)))
        for study in ("000", "001", "003", "004")
        if study not in left_out
    ]
    if is_cpu:
        sources = [
            replace(source, data=tuple(d for d in source.data if _leaves_work_out(d.recipe)))
            for source in sources
        ]
    return tuple(source for source in sources if source.data)


def _leaves_work_out(recipe: Recipe) -> bool:
    return not any(technique.facts.same_picture for technique in recipe)


def measured_elsewhere(sources: Iterable[PriorSource]) -> list[Technique]:
    """Return recipes measured with the same model on the same family, to try as they were written."""
    data = [datum for source in sources for datum in source.data if datum.error <= SAME]
    return list(dict.fromkeys(technique for datum in data for technique in datum.recipe))


def _of_records(model: str, mine: str | None) -> Iterable[Datum]:
    groups: dict[tuple[str, str, int, int], dict[str, RecordedFigures]] = defaultdict(dict)
    for (name, recipe, height, width), every in all_recorded().items():
        for figures in every:
            groups[name, figures.device, height, width].setdefault(recipe, figures)
    for (name, device, _, _), recipes in groups.items():
        base = recipes.get("baseline")
        if base is None:
            continue
        before = base.seconds(base.steps)
        gains = {
            recipe: math.log(before / figures.seconds(base.steps)) for recipe, figures in recipes.items()
        }
        data = _data(gains, _error(name == model, architecture_of(device), mine))
        # 15 steps of 30 halve the time, and 15 of 20 do not.
        yield from (datum for datum in data if not any(isinstance(t, Steps) for t in datum.recipe))


def no_record(device_name: str, device: str = "cuda") -> str | None:
    """Return a note that no record is of this GPU or its generation; None if there is one, and for a CPU."""
    if device == "cpu" or has_records(device_name, (*committed_tables(), *community_tables())):
        return None
    return (
        f"no record is of {device_name} or its generation, so that the search begins with what was measured on other "
        "GPUs; `vivace contribute` makes yours known"
    )


def _of_tables(tables: Iterable[EvidenceTable], model: str, mine: str | None) -> Iterable[Datum]:
    """Yield the gain of each recipe over its table's baseline."""
    for table in tables:
        gains = {
            row.recipe: math.log(row.gain.point)
            for row in table.rows
            if row.gain is not None and row.outcome == "measured" and row.batch == 1
        }
        error = _error(table.model == model, architecture_of(table.gpu), mine)
        yield from _data(gains, error + (0.0 if table.baseline == "baseline" else _NOT_THE_BASELINE))


def _error(same_model: bool, theirs: str | None, mine: str | None) -> float:
    if mine is None:
        return _NO_GPU + (_OTHER_FAMILY if same_model else _BOTH_OTHER)
    if same_model:
        return _SAME if theirs == mine else _OTHER_FAMILY
    return _OTHER_MODEL if theirs == mine else _BOTH_OTHER


def _data(gains: Mapping[str, float], error: float) -> Iterable[Datum]:
    for text, gain in gains.items():
        try:
            recipe = resolve_cached(text)
        except RecipeError:  # of an older vivace
            continue
        if not recipe.is_baseline and (gain > _MUCH_SLOWER or len(recipe.techniques) == 1):
            yield Datum(recipe, gain, error)
