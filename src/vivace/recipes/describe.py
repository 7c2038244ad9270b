"""Describe a technique from its own declaration, as plain data: for the command line and the generated docs."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import ValidationError

from vivace.foundation.spec.recipe_syntax import print_value
from vivace.machinery.technique import Arithmetic, Machine, Target, Technique
from vivace.techniques import ALIASES


def describe(technique: type[Technique], machine: Machine | None) -> dict[str, Any]:
    """Return name, usage, knobs, targets, aliases, and the variants that run on `machine` (None: left out)."""
    knobs = [_knob(name, field) for name, field in technique.knobs().items()]
    inside = ", ".join(_usage(k) for k in knobs)
    return {
        "name": technique.name,
        "summary": technique.summary,
        "usage": technique.name + (f"({inside})" if inside else ""),
        "stage": technique.declared.stage.name.lower(),
        "owns": technique.declared.owns,
        "same_picture": technique.declared.same_picture,
        "has_script": technique.script is not Technique.script,
        "knobs": knobs,
        "targets": list(technique.declared.targetable),
        "default_targets": list(technique.declared.default_targets),
        "aliases": [alias for alias, (name, _) in ALIASES.items() if name == technique.name],
        "here": [] if machine is None else states(technique, machine),
    }


def _usage(knob: dict[str, Any]) -> str:
    """Return "fp32|fp16|bf16" for a required choice, "karras=False" for a knob with a default, else the knob's name."""
    if not knob["required"]:
        return f"{knob['name']}={knob['default'] if knob['default'] != '' else repr('')}"
    choices = knob["choices"][:4]
    more = "|..." if len(knob["choices"]) > len(choices) else ""
    return "|".join(choices) + more if choices else str(knob["name"])


def states(technique: type[Technique], machine: Machine) -> list[dict[str, Any]]:
    """Return the choices with their arithmetic, and why a choice is unsupported on the machine.

    That is the technique with each choice of its first knob (or a typical value of it), and with each choice of its
    other knobs: with the first value that this goes with, and those that do something else to numbers then.
    """
    target = Target.of_machine(machine)
    states = []
    for text, chosen in variants(technique).items():
        states.append(
            {
                "recipe": text,
                "weights": chosen.facts.arithmetic.weights,
                "products": chosen.facts.arithmetic.products,
                "unsupported": chosen.unsupported(target),
            }
        )
    return states


def variants(technique: type[Technique]) -> dict[str, Technique]:
    """Return the choices, as `states` lists them, by their recipes."""
    return {text: technique(**knobs) for text, knobs in _variants(technique).items()}


def choices(technique: Technique) -> tuple[object, ...]:
    """Return the variant of a technique: its name and the knobs that are choices, without its numbers."""
    knobs = technique.knobs()
    return (technique.name, *(getattr(technique, name) for name, field in knobs.items() if _choices(field)))


def _variants(technique: type[Technique]) -> dict[str, dict[str, Any]]:
    """Return knobs by their recipe, e.g. {"compile(default)": ..., "compile(blocks=repeated)": ...}."""
    if not technique.knobs():
        return {technique.name: {}}
    first, *others = technique.knobs()
    field = technique.knobs()[first]
    firsts: list[Any] = list(_choices(field)) or [_typical(first, field)]
    variants: dict[str, dict[str, Any]] = {}
    for value in firsts:
        knobs = {first: value} | _completion(technique, {first: value}, others)
        words = [str(value), *(f"{name}={choice}" for name, choice in knobs.items() if name != first)]
        variants[technique.name + (f"({', '.join(words)})" if value is not None else "")] = knobs
    for name in others:
        other = technique.knobs()[name]
        for choice in _choices(other):
            if not other.is_required() and choice == other.default:
                continue
            arithmetics: set[Arithmetic] = set()
            for value in firsts:
                chosen = _valid(technique, {first: value, name: choice})
                # Not everything goes together: a scale per tensor is for some schemes only.
                if chosen is None or chosen.facts.arithmetic in arithmetics:
                    continue
                arithmetics.add(chosen.facts.arithmetic)
                argument = f"{value}, " if field.is_required() or value != field.default else ""
                variants[f"{technique.name}({argument}{name}={choice})"] = {first: value, name: choice}
    return variants


def _completion(technique: type[Technique], knobs: dict[str, Any], others: list[str]) -> dict[str, Any]:
    """Return the further knob that these need: a scheme outside the default library names its backend."""
    if _valid(technique, knobs) is None:
        for name in others:
            for choice in _choices(technique.knobs()[name]):
                if _valid(technique, knobs | {name: choice}) is not None:
                    return {name: choice}
    return {}


def _valid(technique: type[Technique], knobs: dict[str, Any]) -> Technique | None:
    try:
        return technique(**knobs)
    except ValidationError:
        return None


def _choices(field: Any) -> list[str]:
    return [choice for choice in get_args(field.annotation) if isinstance(choice, str)]


def _knob(name: str, field: Any) -> dict[str, Any]:
    limits = []
    words = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    for limit in field.metadata:
        kind = type(limit).__name__
        if kind in words:
            limits.append(f"{words[kind]} {getattr(limit, kind.lower()):g}")
    return {
        "name": name,
        "about": field.description or "",
        "required": field.is_required(),
        "default": None if field.is_required() else _default(field.default),
        "choices": _choices(field),
        "limits": "".join(f", {limit}" for limit in limits),
        "tune": _tune(field),
    }


def _default(value: Any) -> Any:
    """Return a default as a recipe writes it, if it is a list."""
    return print_value(value) if isinstance(value, tuple) else value


def _typical(name: str, field: Any) -> Any:
    """Return the default, a value worth tuning, or a placeholder such as PATH."""
    if not field.is_required():
        return field.default
    return next(iter(_tune(field)), name.upper())


def _tune(field: Any) -> list[Any]:
    return list((field.json_schema_extra or {}).get("tune", []))
