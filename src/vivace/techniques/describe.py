"""Describe a technique from its own declaration, as plain data: for the command line and the generated docs."""

from __future__ import annotations

from typing import Any, get_args

from vivace.spec.technique import Machine, Target, Technique
from vivace.techniques import ALIASES


def describe(technique: type[Technique], machine: Machine | None) -> dict[str, Any]:
    """Name, usage, knobs, targets, aliases, and what of it runs on `machine` (None: left out)."""
    knobs = [_knob(name, field) for name, field in technique.model_fields.items()]
    inside = ", ".join(_usage(k) for k in knobs)
    return {
        "name": technique.name,
        "summary": technique.summary,
        "usage": technique.name + (f"({inside})" if inside else ""),
        "stage": technique.stage.name.lower(),
        "owns": technique.owns,
        "same_picture": technique.same_picture,
        "has_script": technique.script is not Technique.script,
        "knobs": knobs,
        "targets": list(technique.targetable),
        "default_targets": list(technique.default_targets),
        "aliases": [alias for alias, (name, _) in ALIASES.items() if name == technique.name],
        "here": [] if machine is None else states(technique, machine),
    }


def _usage(knob: dict[str, Any]) -> str:
    """ "fp32|fp16|bf16" for a required choice, "karras=False" for a knob with a default, else the knob's name."""
    if not knob["required"]:
        return f"{knob['name']}={knob['default']}"
    shown = knob["choices"][:4]
    more = "|..." if len(knob["choices"]) > len(shown) else ""
    return "|".join(shown) + more if shown else str(knob["name"])


def states(technique: type[Technique], machine: Machine) -> list[dict[str, Any]]:
    """Each choice of the first knob (or the technique itself) and why it is unsupported on the machine, if so."""
    target = Target(machine=machine, components=technique.default_targets)
    fields = technique.model_fields
    if not fields:
        return [{"recipe": technique.name, "unsupported": technique().unsupported(target)}]
    first, field = next(iter(fields.items()))
    choices = [c for c in get_args(field.annotation) if isinstance(c, str)]
    if not choices:
        tune = _tune(field)
        value = tune[0] if field.is_required() else field.default
        made = technique(**{first: value})
        return [{"recipe": f"{technique.name}({value})", "unsupported": made.unsupported(target)}]
    return [
        {
            "recipe": f"{technique.name}({choice})",
            "unsupported": technique(**{first: choice}).unsupported(target),
        }
        for choice in choices
    ]


def _knob(name: str, field: Any) -> dict[str, Any]:
    limits = []
    words = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    for limit in field.metadata:
        kind = type(limit).__name__
        if kind in words:
            limits.append(f"{words[kind]} {getattr(limit, kind.lower()):g}")
    choices = [str(c) for c in get_args(field.annotation)]
    return {
        "name": name,
        "about": field.description or "",
        "required": field.is_required(),
        "default": None if field.is_required() else field.default,
        "choices": choices,
        "limits": "".join(f", {limit}" for limit in limits),
        "tune": _tune(field),
    }


def _tune(field: Any) -> list[Any]:
    return list((field.json_schema_extra or {}).get("tune", []))
