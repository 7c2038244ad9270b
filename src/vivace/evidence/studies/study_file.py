"""The format of a study file, and the five published studies that ship with vivace.

A file is TOML of bounded size. Wrong values, misspelt names and recipes that do not exist are errors that name the
place in the file.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vivace.errors import RecipeError, UsageError, nearest
from vivace.evidence.studies.study_columns import FIGURES, Published, parse_published
from vivace.evidence.studies.study_columns import MAX_BYTES as MAX_PUBLISHED_BYTES
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import expectation_of, shorten
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.study import QualityRequest, WorkloadRequest
from vivace.foundation.spec.timing import Timing
from vivace.foundation.untrusted.files import is_path, not_there, read_text, reading, user_path
from vivace.recipes.resolve import resolve

MAX_BYTES = 1_000_000
MAX_RECIPES = 500
"""Recipes of one part on one model. A round takes seconds at least, so a larger number is a mistake in a matrix."""

Kind = Literal["faster", "slower", "same", "ratio", "limit", "best", "gpu", "open"]


class Labelled(Spec):
    """A recipe with the name of its row.

    Attributes:
        row: the label in tables, and the row of the published numbers that it belongs to; by default the recipe.
        tiny: the recipe with --tiny, where it differs.
    """

    recipe: str
    row: str = ""
    tiny: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        return {"recipe": data} if isinstance(data, str) else data

    @property
    def label(self) -> str:
        return self.row or self.recipe


class Part(Spec):
    """One comparison: recipes on models, each model with its own baseline.

    The forms of recipes (recipes, matrix, stack, leave_one_out) can be combined; at least one is given.

    Attributes:
        name: what --part takes.
        models: names of the catalogue, or other values of `vivace bench --model`.
        baseline: the recipe that others are compared with, with or without the name of its row.
        recipes: a list of recipes.
        matrix: by axis, the recipes to choose from; "" adds nothing. Every combination is one recipe.
        stack: recipes that are added one after the other to the baseline, each on top of those before it. One that sets
            the same thing as an earlier one replaces it.
        leave_one_out: a recipe; it is measured whole, and without each of its techniques.
        workload: values that differ from the file's, for this part.
        figures: the figures to show, in this order: names of `vivace.evidence.studies.study_columns.FIGURES`.
        tables: tables of the published numbers that belong to this part; empty for all.
        rivals: also measure fewer plain steps beside each step cache.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=60)
    title: str = Field(default="", max_length=200)
    models: tuple[str, ...] = Field(min_length=1, max_length=100)
    baseline: Labelled = Labelled(recipe=BASELINE)
    recipes: tuple[Labelled, ...] = Field(default=(), max_length=MAX_RECIPES)
    matrix: dict[str, tuple[str, ...]] = Field(default={})
    stack: tuple[Labelled, ...] = Field(default=(), max_length=100)
    leave_one_out: str | None = None
    workload: WorkloadRequest = WorkloadRequest()
    figures: tuple[str, ...] = ("latency", "model_memory", "peak_memory")
    tables: tuple[str, ...] = ()
    rivals: bool = False

    @model_validator(mode="after")
    def _has_recipes(self) -> Part:
        if not (self.recipes or self.matrix or self.stack or self.leave_one_out):
            raise ValueError("must have recipes: give one of recipes, matrix, stack, leave_one_out")
        return self

    def labels(self) -> list[str]:
        """Return the names of all rows that the file can name; those of a matrix are its recipes."""
        labels = [self.baseline.label, *(row.label for row in self.recipes)]
        labels += [row.row or f"+ {row.recipe}" for row in self.stack]
        if self.matrix:
            labels += [
                "+".join(filter(None, values)) or BASELINE
                for values in itertools.product(*self.matrix.values())
            ]
        if self.leave_one_out:
            try:
                whole = resolve(self.leave_one_out)
            except RecipeError:
                return labels  # reported with its place when the recipes are checked
            labels += [whole.text, *(f"without {technique.text}" for technique in whole)]
        return labels

    def recipe_texts(self) -> list[str]:
        labelled = [self.baseline, *self.recipes, *self.stack]
        texts = [text for each in labelled for text in (each.recipe, each.tiny) if text is not None]
        texts += [text for values in self.matrix.values() for text in values if text]
        return texts + ([self.leave_one_out] if self.leave_one_out else [])

    @field_validator("matrix")
    @classmethod
    def _matrix_is_bounded(cls, matrix: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        number = 1
        for axis, values in matrix.items():
            if not values:
                raise ValueError(f"axis {axis!r} must have at least one recipe")
            number *= len(values)
        if number > MAX_RECIPES:
            raise ValueError(f"must have at most {MAX_RECIPES} combinations, and it has {number:,}")
        return matrix

    @field_validator("figures")
    @classmethod
    def _figures_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in FIGURES:
                raise ValueError(f"{name!r} is not a figure{nearest(name, FIGURES)} ({', '.join(FIGURES)})")
        return names


class Tiny(Spec):
    """How `--tiny` runs the study on embedded models.

    Attributes:
        models: the embedded model that replaces each model; models that are not named are left out.
        parts: names of the parts to run; empty for all.
        replace: replacements of techniques, e.g. compile by compile(backend=aot_eager); "" leaves one out.
        workload, timing, quality: replace those of the file.
    """

    models: dict[str, str] = Field(min_length=1)
    parts: tuple[str, ...] = ()
    replace: dict[str, str] = Field(default={})
    workload: WorkloadRequest = WorkloadRequest()
    timing: Timing = Timing(rounds=1)
    quality: QualityRequest = QualityRequest()


class Synthetic(Spec):
    """How `--synthetic` runs the study.

    Attributes:
        replace: replacements of techniques that random weights cannot decide.
        about: why, and how it was chosen; shown beside the rows. Such rows say nothing about what they stand for
            where the choice decides.
    """

    replace: dict[str, str] = Field(min_length=1)
    about: str = Field(min_length=1, max_length=1000)


class Claim(Spec):
    """One conclusion.

    Kinds:
        faster, slower: each of `rows` is faster or slower than `than`.
        same: each of `rows` takes as long as `than`, within the share `within`.
        ratio: `figure` of each of `rows`, divided by that of `than`, lies between `at_least` and `at_most`.
        limit: `figure` of each of `rows` lies between `at_least` and `at_most` (seconds, GB or its own unit).
        best: the first of `rows` has the lowest `figure` of all of `among`.
        gpu: every row, or each of `rows`, is faster on `gpu` than on `than`.
        open: no row can tell; `because` says why.

    Attributes:
        models: only these; empty for all of the part.
        figure: a figure; None for the part's time.
        gpus: published GPUs that the conclusion is about; empty for all. Measured devices always count.
    """

    says: str = Field(min_length=1, max_length=1000)
    kind: Kind
    part: str = ""
    models: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    than: str = ""
    figure: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    within: float = Field(default=0.03, gt=0, lt=1)
    among: tuple[str, ...] = ()
    gpu: str = ""
    gpus: tuple[str, ...] = ()
    because: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> Claim:
        needs = {
            "faster": ("rows", "than"),
            "slower": ("rows", "than"),
            "same": ("rows", "than"),
            "ratio": ("rows", "than", "figure"),
            "limit": ("rows", "figure"),
            "best": ("rows",),
            "gpu": ("gpu", "than"),
            "open": ("because",),
        }[self.kind]
        for name in needs:
            if not getattr(self, name):
                raise ValueError(f"a claim of kind {self.kind} needs {name}")
        if self.kind in ("ratio", "limit") and self.at_least is None and self.at_most is None:
            raise ValueError(f"a claim of kind {self.kind} needs at_least or at_most")
        if self.figure is not None and self.figure not in FIGURES:
            raise ValueError(f"{self.figure!r} is not a figure{nearest(self.figure, FIGURES)}")
        return self


class StudyFile(Spec):
    """A study as its file declares it.

    Attributes:
        name: the number of a published study, or the path of the file.
        title, about: one line, and a few sentences.
        source: whose numbers the published ones are.
        published: name of the CSV file of published numbers, beside the study's.
        profiled: the published times are of calls under a profiler.
        model: by model, the workload where it differs from the file's (steps, guidance, size).
        claim: the study's conclusions, as statements that rows can confirm or contradict.
    """

    name: str
    title: str = Field(max_length=200)
    about: str = Field(default="", max_length=5000)
    source: str = Field(default="", max_length=500)
    published: str | None = None
    profiled: bool = False
    workload: WorkloadRequest = WorkloadRequest()
    model: dict[str, WorkloadRequest] = Field(default={})
    timing: Timing = Timing()
    quality: QualityRequest = QualityRequest()
    part: tuple[Part, ...] = Field(min_length=1, max_length=100)
    claim: tuple[Claim, ...] = Field(default=(), max_length=200)
    tiny: Tiny | None = None
    synthetic: Synthetic | None = None
    cells: tuple[Published, ...] = ()

    @model_validator(mode="after")
    def _names_are_consistent(self) -> StudyFile:
        names = [part.name for part in self.part]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two parts are named {twice!r}; give each its own name")
        models = {model for part in self.part for model in part.models}
        tiny = self.tiny
        _check_names("[tiny] names the part", tiny.parts if tiny else (), names, f" ({', '.join(names)})")
        _check_names("[model] names", self.model, models)
        _check_names("[tiny.models] names", tiny.models if tiny else (), models)
        for place, workload in (
            ("[workload]", self.workload),
            *((f"[model.{name}]", table) for name, table in self.model.items()),
            *((f"part {part.name}", part.workload) for part in self.part),
            *((("[tiny.workload]", tiny.workload),) if tiny else ()),
        ):
            if len(workload.batches) > 1:
                number = len(workload.batches)
                raise ValueError(f"{place} has {number} batches; give one, and a part for each other")
        for claim in self.claim:
            meant = [part for part in self.part if claim.part in ("", part.name)]
            if not meant:
                _check_names("a claim names the part", (claim.part,), names, f" ({', '.join(names)})")
            than = (claim.than,) if claim.than and claim.kind not in ("gpu", "open") else ()
            labels = [row for part in meant for row in part.labels()]
            _check_names("a claim names the row", (*claim.rows, *claim.among, *than), labels)
            _check_names("a claim names the model", claim.models, models)
        return self


def _check_names(what: str, names: Iterable[str], known: Collection[str], more: str = "") -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r}, which no part has{nearest(name, known)}{more}")


def published_studies() -> tuple[str, ...]:
    files = resources.files("vivace.evidence.studies").joinpath("published").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def read_study(name: str | Path) -> StudyFile:
    """Return a published study by its number, or the study of a file.

    Raises:
        UsageError: there is none, or the file is not a study; the message names the place.
    """
    if str(name) in published_studies():
        folder = resources.files("vivace.evidence.studies").joinpath("published")
        return _parse(
            folder.joinpath(f"{name}.toml").read_text("utf-8"),
            str(name),
            lambda file: parse_published(folder.joinpath(file).read_text("utf-8"), file),
        )
    path = user_path(name)
    if is_path(str(name), (".toml",)) and not path.exists():
        raise UsageError(not_there(str(name)))
    if path.suffix != ".toml" and not path.exists():
        studies = published_studies()
        raise UsageError(f"no study '{shorten(str(name))}'; give {', '.join(studies)} or a .toml file")

    def beside(file: str) -> tuple[Published, ...]:
        if Path(file).name != file:
            raise UsageError(f"{path}: published = {file!r} must be the name of a file beside the study")
        there = path.parent / file
        with reading(there, UsageError, "published names a CSV file beside the study (docs/studies.md)"):
            return parse_published(read_text(there, MAX_PUBLISHED_BYTES), str(there))

    with reading(path, UsageError, "give a study file (docs/studies.md)"):
        text = read_text(path, MAX_BYTES)
    return _parse(text, str(path), beside)


def _parse(text: str, name: str, read_cells: Callable[[str], tuple[Published, ...]]) -> StudyFile:
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}; see docs/studies.md") from None
    for key in ("name", "cells"):
        if key in content:
            raise UsageError(f"{name}: {key} {shorten(repr(content[key]))} is not known; leave it out")
    published = content.get("published")
    cells = read_cells(published) if isinstance(published, str) else ()
    try:
        study = StudyFile.model_validate({**content, "name": name, "cells": cells})
    except ValidationError as error:
        raise UsageError(f"{name}: {_problem_of(error)}; see docs/studies.md") from None
    for part in study.part:
        for recipe in part.recipe_texts():
            _check_recipe(recipe, f"{name}, part {part.name}")
    for place, table in (("tiny", study.tiny), ("synthetic", study.synthetic)):
        for old, new in table.replace.items() if table else ():
            for recipe in filter(None, (old, new)):
                _check_recipe(recipe, f"{name}, [{place}.replace]")
            if len(resolve(old).techniques) != 1:
                raise UsageError(f"{name}, [{place}.replace]: '{old}' must be one technique")
    return study


def _check_recipe(text: str, place: str) -> None:
    try:
        resolve(text)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error.problem}", error.text, error.start) from None


def _problem_of(error: ValidationError) -> str:
    """Return the first problem with its place in the file: "part 2, models: must be a list"."""
    problem = error.errors()[0]
    steps: list[str] = []
    for step in problem["loc"]:
        if isinstance(step, int) and steps:
            steps[-1] += f" {step + 1}"
        else:
            steps.append(str(step))
    place, reason = ", ".join(steps), expectation_of(error)
    if problem["type"] == "extra_forbidden":
        fields = _fields_at(problem["loc"][:-1])
        known = f" (known: {', '.join(fields)})" if fields else ""
        return f"{place}: is not known{nearest(str(problem['loc'][-1]), fields)}{known}"
    if problem["type"] in ("value_error", "missing", "too_short"):
        return f"{place}: {reason}" if place else reason
    return f"{place}: {shorten(repr(problem.get('input')))} {reason}"


def _fields_at(place: Sequence[int | str]) -> list[str]:
    kind: type[Spec] | None = StudyFile
    for step in place:
        if isinstance(step, str) and kind is not None:
            kind = _TABLES.get(step)
    names = [] if kind is None else list(kind.model_fields)
    return [name for name in names if kind is not StudyFile or name not in ("name", "cells")]


_TABLES: dict[str, type[Spec]] = {
    "part": Part,
    "tiny": Tiny,
    "synthetic": Synthetic,
    "workload": WorkloadRequest,
    "timing": Timing,
    "quality": QualityRequest,
    "recipes": Labelled,
    "stack": Labelled,
    "baseline": Labelled,
    "claim": Claim,
}
