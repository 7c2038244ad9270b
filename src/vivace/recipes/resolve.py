"""From a recipe's text to techniques with checked knobs, targets and slots, and its one canonical form."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from vivace.errors import RecipeError, nearest
from vivace.foundation.spec.input_errors import expectation_of, shorten
from vivace.foundation.spec.recipe_syntax import BASELINE, BEST, ParsedTechnique, parse_recipe
from vivace.machinery.technique import COMPONENTS, DENOISERS, Component, Technique
from vivace.recipes.recipe import Recipe, conflicts, in_order
from vivace.techniques import ALIASES, TECHNIQUES, missing

_TARGET_ALIASES: dict[str, Component] = dict.fromkeys(DENOISERS, "denoiser")


def resolve(text: str) -> Recipe:
    """Parse and check a recipe."""
    parsed = parse_recipe(text)
    techniques = [_resolve_one(text, spec) for spec in parsed]
    places = {id(technique): spec for technique, spec in zip(techniques, parsed, strict=True)}
    ordered = in_order(techniques)
    for conflict in conflicts(ordered):
        # Point at the one that was written later.
        place = max((places[id(t)] for t in (conflict.technique, conflict.other)), key=lambda p: p.start)
        raise RecipeError(conflict.reason, text, place.start, len(place.name))
    return Recipe(ordered)


def _resolve_one(text: str, parsed: ParsedTechnique) -> Technique:
    name, arguments = parsed.name, list(parsed.arguments)
    knobs: dict[str, object] = {}
    if name in ALIASES:
        name, value = ALIASES[name]
        first = next(iter(TECHNIQUES[name].knobs()))
        if value is not None:
            knobs[first] = value
        for argument in arguments if value is not None else ():
            if argument.name is None or argument.name == first:
                raise RecipeError(
                    f"'{parsed.name}' already stands for {name}({value}), so {first} cannot be given",
                    text,
                    argument.start,
                    argument.length,
                )
    technique = TECHNIQUES.get(name)
    if technique is None:
        alone = f"'{BASELINE}' is no technique: it means that nothing is applied, so it stands alone"
        chosen = (
            f"'{BEST}' depends on the model and the card; here, give the recipe that `vivace recommend` names"
        )
        problem = {BASELINE: alone, BEST: chosen}.get(name) or missing(name, BASELINE)
        raise RecipeError(problem, text, parsed.start, len(parsed.name))
    fields = list(technique.knobs())
    places: dict[str, tuple[int, int]] = {}
    positional = iter(f for f in fields)
    for argument in arguments:
        key = argument.name
        if key is None:
            key = next(positional, None)
            if key is None:
                takes = f"takes at most {len(fields)}" if fields else "takes no arguments"
                raise RecipeError(
                    f"too many arguments: {name} {takes}", text, argument.start, argument.length
                )
        elif key not in fields:
            knob_list = f" (its knobs: {', '.join(fields)})" if fields else " (it has none)"
            raise RecipeError(
                f"{name} has no knob '{key}'{nearest(key, fields)}{knob_list}",
                text,
                argument.start,
                argument.length,
            )
        if key in places:
            raise RecipeError(f"'{key}' is given twice", text, argument.start, argument.length)
        knobs[key] = argument.value
        places[key] = (argument.start, argument.length)
    return _instance(text, parsed, technique, knobs, places)


def _instance(
    text: str,
    parsed: ParsedTechnique,
    technique: type[Technique],
    knobs: dict[str, object],
    places: dict[str, tuple[int, int]],
) -> Technique:
    for key, value in knobs.items():
        if isinstance(value, str) and _choices(technique.model_fields[key]):
            knobs[key] = value = value.lower()
        # pydantic would take True for 1 and "20" for 20; a recipe says what it means.
        kinds = _kinds(technique.model_fields[key])
        number = bool(kinds & {int, float})
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not is_number and not (value is None and type(None) in kinds):
            start, length = places[key]
            raise RecipeError(
                f"{technique.name}: {_expectation(key, technique)}; got {shorten(repr(value))}",
                text,
                start,
                length,
            )
    try:
        return technique(**cast("dict[str, Any]", {**knobs, "targets": _targets(text, parsed, technique)}))
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # knobs that are right one by one, but not together
            raise RecipeError(
                f"{technique.name}: {expectation_of(error)}", text, parsed.start, len(parsed.name)
            ) from None
        key = str(problem["loc"][0])
        wanted_text = _expectation(key, technique)
        if problem["type"] == "missing":
            raise RecipeError(
                f"{technique.name} needs a value: {wanted_text}", text, parsed.start, len(parsed.name)
            ) from None
        start, length = places.get(key, (parsed.start, len(parsed.name)))
        value = knobs.get(key)
        choices = _choices(technique.model_fields[key])
        hint = nearest(str(value), choices) if choices else ""
        raise RecipeError(
            f"{technique.name}: {wanted_text}; got {shorten(repr(value))}{hint}", text, start, length
        ) from None


def _kinds(field: FieldInfo) -> set[object]:
    """Return the types of a knob: {float} for float, {float, NoneType} for float | None."""
    return set(get_args(field.annotation)) or {field.annotation}


def _choices(field: FieldInfo) -> list[str]:
    arguments = get_args(field.annotation)
    return [str(a) for a in arguments if isinstance(a, str)]


def _expectation(key: str, technique: type[Technique]) -> str:
    """Return "steps must be a whole number from 1 to 1000", from the field's own declaration."""
    field = technique.model_fields[key]
    choices = _choices(field)
    if choices:
        return f"{key} must be one of {', '.join(choices)}"
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    kind = " or ".join(word for kind, word in names.items() if kind in _kinds(field)) or "a value"
    words = {"Ge": "at least", "Gt": "more than", "Le": "at most", "Lt": "less than"}
    limits = []
    for limit in _limits(field):
        word = words.get(type(limit).__name__)
        if word:
            limits.append(f"{word} {getattr(limit, type(limit).__name__.lower()):g}")
    return f"{key} must be {kind}" + (f", {' and '.join(limits)}" if limits else "")


def _limits(field: FieldInfo) -> list[Any]:
    """Return the range of a knob. For an optional number, pydantic keeps it inside the annotation of the number."""
    limits = list(field.metadata)
    for argument in get_args(field.annotation):
        limits += getattr(argument, "__metadata__", ())
    return limits


def _targets(text: str, parsed: ParsedTechnique, technique: type[Technique]) -> tuple[str, ...]:
    if not parsed.targets:
        return tuple(technique.declared.default_targets)
    targets: list[Component] = []
    for word, start in parsed.targets:
        target = _TARGET_ALIASES.get(word, cast("Component", word))
        if target not in COMPONENTS:
            names = [*COMPONENTS, *_TARGET_ALIASES]
            raise RecipeError(
                f"no target '{word}'{nearest(word, names)} (targets: {', '.join(COMPONENTS)})",
                text,
                start,
                len(word),
            )
        if target not in technique.declared.targetable:
            takes = ", ".join(technique.declared.targetable) or "no targets: it concerns the call as a whole"
            raise RecipeError(
                f"{technique.name} cannot be aimed at {target}; it takes {takes}", text, start, len(word)
            )
        if target in targets:
            raise RecipeError(f"target '{target}' is given twice", text, start, len(word))
        targets.append(target)
    return tuple(c for c in COMPONENTS if c in targets)


@lru_cache(maxsize=4096)
def resolve_cached(text: str) -> Recipe:
    """Return the recipe of a record's text: an answer looks up the same few hundred many times."""
    return resolve(text)
