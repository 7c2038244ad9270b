"""From a study file to comparisons: the recipes of each part on each model, as studies that `run_study` runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vivace.errors import RecipeError, UsageError, nearest
from vivace.evidence.studies.study_file import Labelled, Part, StudyFile
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.study import QualityRequest, Study, WorkloadRequest
from vivace.machinery.technique import Technique
from vivace.models.find import SYNTHETIC
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve


@dataclass(frozen=True)
class StudyRow:
    """One row of a part: a recipe with its label.

    Attributes:
        recipe: in canonical form; as written if its techniques conflict.
        refused: why its techniques conflict; then it is not measured.
        stands_for: the recipe that `recipe` stands for, where random weights could not decide it.
    """

    label: str
    recipe: str
    refused: str | None = None
    stands_for: str | None = None


@dataclass(frozen=True)
class Gain:
    member: str
    without: str
    with_: str


@dataclass(frozen=True)
class ModelPart:
    """A part on one model.

    Attributes:
        measured_on: the measured model: the model itself, an embedded model in its place, or its synthetic form.
        gains: for a stack, and where one technique is left out.
        study: the study for `run_study`, with the recipes of the cases, each once.
    """

    part: Part
    model: str
    measured_on: str
    cases: tuple[StudyRow, ...]
    gains: tuple[Gain, ...]
    study: Study

    @property
    def is_stand_in(self) -> bool:
        """Whether a small model replaces the study's, so that figures say nothing about it."""
        return self.measured_on not in (self.model, SYNTHETIC + self.model)


def expand(
    file: StudyFile,
    *,
    tiny: bool = False,
    synthetic: bool = False,
    models: Sequence[str] = (),
    parts: Sequence[str] = (),
    device: str = "auto",
) -> tuple[ModelPart, ...]:
    """Return the comparisons of a study."""
    if tiny and synthetic:
        raise UsageError("--tiny and --synthetic exclude each other; give one of them")
    if tiny and file.tiny is None:
        raise UsageError(
            f"{file.name} has no [tiny] table, which says what stands for its models with --tiny"
        )
    known_models = list(dict.fromkeys(model for part in file.part for model in part.models))
    _check_names("--model", models, known_models, file)
    _check_names("--part", parts, [part.name for part in file.part], file)
    asked_parts, stand_ins = tuple(parts), file.tiny if tiny else None
    if stand_ins is not None:
        asked_parts = asked_parts or stand_ins.parts
    model_parts = [
        _on_model(file, part, model, tiny, synthetic, device)
        for part in file.part
        if not asked_parts or part.name in asked_parts
        for model in part.models
        if (not models or model in models) and (stand_ins is None or model in stand_ins.models)
    ]
    if not model_parts:
        raise UsageError(
            f"{file.name}: no part has the models that were asked for; `--dry-run` lists what it has"
        )
    return tuple(model_parts)


def left_out(file: StudyFile, parts: Iterable[ModelPart]) -> list[str]:
    here = {part.model for part in parts}
    return [m for m in dict.fromkeys(m for part in file.part for m in part.models) if m not in here]


def _check_names(option: str, names: Sequence[str], allowed: Sequence[str], file: StudyFile) -> None:
    for name in names:
        if name not in allowed:
            raise UsageError(
                f"{option} {name}: {file.name} has no such thing{nearest(name, allowed)} ({', '.join(allowed)})"
            )


def _on_model(file: StudyFile, part: Part, model: str, tiny: bool, synthetic: bool, device: str) -> ModelPart:
    table = file.tiny if tiny else file.synthetic if synthetic else None
    cases, gains = _cases(part, tiny, table.replace if table is not None else {})
    if synthetic and table is not None:
        published = {case.label: case.recipe for case in _cases(part, tiny, {})[0]}
        cases = [
            replace(case, stands_for=text)
            if (text := published.get(case.label, case.recipe)) != case.recipe
            else case
            for case in cases
        ]
    measured_on, quality, timing = model, file.quality, file.timing
    workload = _merged(file.workload, file.model.get(model), part.workload)
    if tiny and file.tiny is not None:
        measured_on, quality, timing = file.tiny.models[model], file.tiny.quality, file.tiny.timing
        workload = file.tiny.workload
    if synthetic:
        measured_on = model if model.startswith(SYNTHETIC) else SYNTHETIC + model
        quality = QualityRequest(enabled=False)
    recipes = dict.fromkeys(case.recipe for case in cases if case.refused is None)
    study = Study(
        models=(measured_on,),
        recipes=tuple(recipes),
        workload=workload,
        timing=timing,
        quality=quality,
        device=device,
        rivals=part.rivals,
    )
    return ModelPart(part, model, measured_on, tuple(cases), tuple(gains), study)


def _merged(*workloads: WorkloadRequest | None) -> WorkloadRequest:
    """Return the workload in which a later one's values replace those of the earlier ones."""
    fields: dict[str, object] = {}
    for workload in workloads:
        fields |= {} if workload is None else workload.model_dump(exclude_unset=True)
    return WorkloadRequest.model_validate(fields)


def _cases(part: Part, tiny: bool, others: dict[str, str]) -> tuple[list[StudyRow], list[Gain]]:
    swaps = [
        (resolve(old).techniques[0], resolve(new).techniques if new else ()) for old, new in others.items()
    ]

    def recipe_of(labelled: Labelled) -> Recipe:
        if tiny and labelled.tiny is not None:
            return resolve(labelled.tiny)
        return _swapped(resolve(labelled.recipe), swaps)

    current, before = recipe_of(part.baseline), part.baseline.label
    cases, gains = [StudyRow(before, current.text)], []
    for member in part.stack:
        label, added = member.row or f"+ {member.recipe}", recipe_of(member)
        gains.append(Gain(added.text, before, label))
        try:
            current, before = current.replacing(*added), label
            cases.append(StudyRow(label, current.text))
        except RecipeError as error:
            cases.append(StudyRow(label, f"{current.text}+{member.recipe}", refused=error.problem))
    cases += [StudyRow(row.label, recipe_of(row).text) for row in part.recipes]
    for values in itertools.product(*part.matrix.values()) if part.matrix else ():
        text = "+".join(value for value in values if value) or BASELINE
        try:
            cases.append(StudyRow(text, _swapped(resolve(text), swaps).text))
        except RecipeError as error:
            cases.append(StudyRow(text, text, refused=error.problem))
    if part.leave_one_out is not None:
        whole = _swapped(resolve(part.leave_one_out), swaps)
        cases.append(StudyRow(whole.text, whole.text))
        for technique in whole:
            label = f"without {technique.text}"
            cases.append(StudyRow(label, whole.without(technique).text))
            gains.append(Gain(technique.text, label, whole.text))
    return _each_once(cases, part), gains


def _swapped(recipe: Recipe, swaps: Sequence[tuple[Technique, tuple[Technique, ...]]]) -> Recipe:
    """Return the recipe with techniques replaced, on the same targets. Knobs must be equal, targets need not."""
    techniques: list[Technique] = []
    for technique in recipe:
        for old, new in swaps:
            if type(old) is type(technique) and old.values == technique.values:
                techniques += [
                    type(technique_)(
                        **technique_.values,
                        targets=technique.targets if technique_.declared.targetable else (),
                    )
                    for technique_ in new
                ]
                break
        else:
            techniques.append(technique)
    return Recipe.of(techniques)


def _each_once(cases: Sequence[StudyRow], part: Part) -> list[StudyRow]:
    """Return the cases without repetitions."""
    by_label: dict[str, StudyRow] = {}
    for case in cases:
        other = by_label.setdefault(case.label, case)
        if other.recipe != case.recipe:
            raise UsageError(
                f"part {part.name}: two recipes are called '{case.label}' ({other.recipe} and {case.recipe}); "
                "give each its own row"
            )
    return list(by_label.values())
