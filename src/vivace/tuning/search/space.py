"""The recipes that can be searched, from the declarations of the techniques alone.

A technique's options are its default knobs with one of them changed at a time, to each value that it declares as worth
tuning; the first knob, if it is a choice by name, takes every choice. Further values are reached by changing an option
of a recipe once more. So a new technique is searched without a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast, get_args

from pydantic import ValidationError

from vivace.errors import RecipeError
from vivace.machinery.technique import Component, Technique
from vivace.recipes.recipe import Recipe
from vivace.techniques import TECHNIQUES
from vivace.tuning.search.objective import Objective

Why = Callable[[Technique], str | None]
Components = Collection[Component] | None
_DEPTH = 8  # techniques of a recipe that the search grows to, at most


def tune_values(kind: type[Technique], knob: str) -> list[Any]:
    """Return the values of a knob that are searched: its default, those worth tuning, then other choices by name."""
    field_ = kind.knobs()[knob]
    extra = field_.json_schema_extra
    assert isinstance(extra, dict)
    tune = cast("list[Any]", extra["tune"])
    is_first = knob == next(iter(kind.knobs()))
    choices = [c for c in get_args(field_.annotation) if isinstance(c, str)] if is_first else []
    default = [] if field_.is_required() else [field_.default]
    values: list[Any] = []
    for value in (*default, *tune, *choices):
        if not any(value == option and type(value) is type(option) for option in values):
            values.append(value)
    return values


def options(kind: type[Technique], components: Components = None) -> list[Technique]:
    """Return a technique's options, the most usual first; empty if a required knob has no value worth tuning."""
    values = {name: tune_values(kind, name) for name in kind.knobs()}
    if not all(values.values()):
        return []
    plain = {name: choices[0] for name, choices in values.items()}
    made = [_made(kind, plain)]
    for name, candidates in values.items():
        made += [_made(kind, plain | {name: value}) for value in candidates[1:]]
    first = next((option for option in made if option is not None), None)
    if first is not None:
        made += [_made(kind, dict(first.values), targets) for targets in _target_sets(kind, components)]
    return list(dict.fromkeys(option for option in made if option is not None))


def fit_targets(technique: Technique, components: Components) -> Technique:
    """Return the technique with its targets limited to the model's, written in the shortest way."""
    kind = type(technique)
    if components is None or technique.targets == kind.declared.default_targets:
        return technique
    targets = tuple(target for target in technique.targets if target in components)
    if targets == tuple(target for target in kind.declared.default_targets if target in components):
        targets = kind.declared.default_targets
    return technique if not targets else _made(kind, technique.values, targets) or technique


def is_usual(technique: Technique) -> bool:
    """Whether it has its usual targets."""
    return technique.targets == technique.declared.default_targets


def is_recommended(technique: Technique) -> bool:
    """Whether its author recommends it: its first knob has the default, or a value that is declared."""
    for name, field_ in list(type(technique).knobs().items())[:1]:
        extra = field_.json_schema_extra
        assert isinstance(extra, dict)
        tune = cast("list[Any]", extra["tune"])
        is_default = not field_.is_required() and technique.values[name] == field_.default
        return not tune or is_default or technique.values[name] in tune
    return True


def variants(technique: Technique, components: Components = None) -> Iterator[Technique]:
    """Yield the technique with one knob or its targets changed."""
    kind = type(technique)
    for name in kind.knobs():
        for value in tune_values(kind, name):
            changed = _made(kind, technique.values | {name: value}, technique.targets)
            if changed is not None and changed != technique:
                yield changed
    for targets in (kind.declared.default_targets, *_target_sets(kind, components)):
        changed = _made(kind, technique.values, targets)
        if changed is not None and changed != technique:
            yield changed


def _target_sets(kind: type[Technique], components: Components) -> list[tuple[Any, ...]]:
    """Return other targets than the default ones: all of the model's, and each single one that is not a default."""
    every = tuple(option for option in kind.declared.targetable if components is None or option in components)
    usual = tuple(option for option in kind.declared.default_targets if option in every)
    target_sets = [every, *((option,) for option in every if option not in usual)]
    return [targets for targets in dict.fromkeys(target_sets) if targets and targets != usual]


def _made(
    kind: type[Technique], knobs: Mapping[str, Any], targets: tuple[Any, ...] | None = None
) -> Technique | None:
    """Return the technique; None if its knobs do not go together."""
    try:
        fields = dict(knobs) if targets is None else {**knobs, "targets": targets}
        return kind(**fields)
    except ValidationError:
        return None


@dataclass
class Space:
    """The recipes of a search.

    Attributes:
        options: the options of recipes.
        cut: options that are left out before anything is timed, with the reason, by their text.
        judges: whether images are compared with the baseline's.
        components: that the model has: options name no others. None if unknown.
        combined: options that work only with others.
    """

    objective: Objective
    options: list[Technique] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)
    judges: bool = True
    components: Components = None
    combined: frozenset[Technique] = frozenset()
    _why_not: Why = field(default=lambda technique: None, repr=False)

    @classmethod
    def of(
        cls,
        objective: Objective,
        why_not: Why = lambda technique: None,
        reported: Iterable[Technique] = (),
        judges: bool = True,
        components: Components = None,
    ) -> Space:
        """Make the space of all techniques.

        Args:
            why_not: says why a technique cannot work here; None if nothing is known against it.
            reported: techniques with the knobs and targets with which they were measured elsewhere.
            judges: whether images are compared with the baseline's.
            components: that the model has; None if unknown.
        """
        space = cls(objective, judges=judges, components=components, _why_not=why_not)
        reported = tuple(fit_targets(option, components) for option in reported)
        for kind in TECHNIQUES.values():
            if kind.name in objective.without:
                space.cut[kind.name] = "--without"
                continue
            if objective.same_picture_only and not kind.declared.same_picture:
                space.cut[kind.name] = "it changes the image, and quality cannot be judged here"
                continue
            named = [option for option in (*objective.kept, *reported) if isinstance(option, kind)]
            for option in (*options(kind, components), *named):
                if option not in space.options and space.allows(option):
                    space.options.append(option)
        return space

    def allows(self, technique: Technique) -> bool:
        """Whether a technique may be used; if not, `cut` says why."""
        if not self.objective.allows(technique) or technique.text in self.cut:
            return False
        facts, why = technique.facts, None
        if not self.objective.keeps(technique):
            why = facts.not_searched or (None if self.judges else facts.not_searched_unjudged)
        if (why := why or self._why_not(technique)) is not None:
            self.cut[technique.text] = why
            return False
        return True

    def leave_out(self, technique: Technique, reason: str) -> None:
        """Remove an option because it failed by itself, unless it works with others."""
        if technique in self.combined:
            return
        self.cut[technique.text] = reason
        self.options = [option for option in self.options if option != technique]

    def base(self) -> Recipe:
        """Return the smallest recipe with everything to keep, with the first options of techniques kept by name."""
        recipe = Recipe.of(self.objective.kept)
        for name in sorted(self.objective.kept_names - {t.name for t in recipe}):
            recipes = [
                r for option in self.options if option.name == name if (r := with_option(recipe, option))
            ]
            if recipes:
                recipe = recipes[0]
        return recipe

    def neighbours(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield the recipes with one technique less, one more, or one swapped for another option."""
        for technique in recipe:
            yield from self._held(recipe.without(technique))
        for option in self.options:
            if option in recipe.techniques:
                continue
            try:
                yield from self._held(recipe.replacing(option))
            except RecipeError:
                continue
        for technique in recipe:
            for other in variants(technique, self.components):
                changed = with_option(recipe.without(technique), other)
                if changed is not None and self.allows(other):
                    yield from self._held(changed)

    def holds(self, recipe: Recipe) -> bool:
        """Whether a recipe has all kept techniques and no removed option."""
        return self.objective.has_kept(recipe) and all(self.allows(technique) for technique in recipe)

    def _held(self, recipe: Recipe) -> Iterator[Recipe]:
        if self.holds(recipe):
            yield recipe

    def pool(
        self, value: Callable[[list[Recipe]], Any], around: list[Recipe], width: int = 4
    ) -> list[Recipe]:
        """Return promising recipes: the neighbours of `around`, and the ends of repeated improvement by `value`.

        The kept techniques by themselves are one of them.

        Args:
            value: returns the estimated value of each recipe, an array of floats.
            width: recipes that are followed at a time.
        """
        recipes: dict[Recipe, None] = dict.fromkeys(self._held(self.base()))
        for recipe in around:
            recipes.update(dict.fromkeys(self.neighbours(recipe)))
        front = [self.base()]
        best = float("-inf")
        for _ in range(_DEPTH):
            following = list(dict.fromkeys(r for recipe in front for r in self.neighbours(recipe)))
            if not following:
                break
            recipes.update(dict.fromkeys(following))
            values = value(following)
            order = sorted(range(len(following)), key=lambda i: -float(values[i]))[:width]
            front = [following[i] for i in order]
            if float(values[order[0]]) <= best:
                break
            best = float(values[order[0]])
        return list(recipes)


def with_option(recipe: Recipe, option: Technique) -> Recipe | None:
    """Return the recipe with one more technique; None if they conflict."""
    try:
        return recipe.with_(option)
    except RecipeError:
        return None


@lru_cache(maxsize=10_000)
def parts_of(technique: Technique) -> frozenset[str]:
    """Return the texts of a technique aimed at each of its components alone, which a run also covers."""
    if len(technique.targets) < 2:
        return frozenset()
    kind = type(technique)
    return frozenset(kind(**technique.values, targets=(target,)).text for target in technique.targets)


@lru_cache(maxsize=100_000)
def path_of(recipe: Recipe) -> tuple[str, ...] | None:
    """Return the techniques that decide on the path of the latents: those that change the image, except for the VAE's.

    Techniques that only round leave the path as it is, and so does another decoder. The interaction of the techniques
    on the path is then the same with and without them.
    """
    changing = sorted(t.text for t in recipe if not t.facts.same_picture and t.targets != ("vae",))
    return tuple(changing) or None


def tries_the_same(recipe: Recipe, other: Recipe, tested: set[str]) -> bool:
    """Whether both would try an option of the same technique first, so that one of them is enough."""
    mine = {technique.name for technique in recipe if technique.text not in tested}
    return any(technique.name in mine for technique in other if technique.text not in tested)
