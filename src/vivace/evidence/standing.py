"""The evidence that a technique runs on a device: records of it here, of others, a compiler, or a declaration."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from vivace.errors import RecipeError
from vivace.evidence.tables import EvidenceTable, Kind
from vivace.foundation.hardware import Near, known_gpu, near
from vivace.machinery.technique import Machine
from vivace.recipes.describe import choices, states, variants
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

FILE = "compiled.json"
CPU = "CPU"


class ClaimBasis(StrEnum):
    """Kinds of evidence for a claim, the best first."""

    HERE = "measured here"
    VIVACE = "measured by vivace"
    OTHERS = "measured by others"
    GENERATION = "measured on its generation"
    COMPILED = "compiled only"
    DECLARED = "no record"
    REFUSED = "refused"


_OF_KIND: Mapping[Kind, ClaimBasis] = {
    "own": ClaimBasis.HERE,
    "committed": ClaimBasis.VIVACE,
    "community": ClaimBasis.OTHERS,
}
"""The evidence of a table on the device itself, by its kind. Published numbers are of other programs."""


@dataclass(frozen=True)
class TechniqueClaim:
    """The claim that a technique, with one of its choices, runs on a device.

    Attributes:
        why: the reason of a refusal; the devices of the records; "" otherwise.
    """

    state: Mapping[str, Any]
    standing: ClaimBasis
    why: str = ""

    @property
    def recipe(self) -> str:
        return str(self.state["recipe"])

    @property
    def devices(self) -> str:
        return "" if self.standing is ClaimBasis.REFUSED else self.why


def claims(machine: Machine, name: str, tables: Iterable[EvidenceTable]) -> list[TechniqueClaim]:
    """Return a claim for each choice of each technique on a device."""
    records = records_by_choice(tables)
    return [
        _claim(state, records[choices(variant)], machine, name)
        for technique in TECHNIQUES.values()
        for state, variant in zip(states(technique, machine), variants(technique).values(), strict=True)
    ]


def only_compiled(recipe: Recipe, capability: tuple[int, int] | None) -> list[str]:
    """Return the techniques of a recipe whose kernels were compiled for this compute capability but not measured."""
    compiled = compiled_recipes(capability)
    return [
        technique.text
        for technique in recipe
        if any(
            text in compiled and choices(variant) == choices(technique)
            for text, variant in variants(type(technique)).items()
        )
    ]


def has_records(name: str, tables: Iterable[EvidenceTable]) -> bool:
    return any(near(name, table.gpu) is not Near.OTHER for table in tables if table.device == "cuda")


def compiled_recipes(capability: tuple[int, int] | None) -> frozenset[str]:
    """Return the recipes whose kernels compile for a GPU of this compute capability, and were not measured there."""
    return (
        frozenset()
        if capability is None
        else _compiled().get(f"{capability[0]}.{capability[1]}", frozenset())
    )


@cache
def _compiled() -> dict[str, frozenset[str]]:
    content = json.loads(resources.files("vivace.evidence").joinpath(FILE).read_bytes())
    return {capability: frozenset(recipes) for capability, recipes in content.items()}


def _claim(
    state: Mapping[str, Any], records: Iterable[tuple[Kind, str]], machine: Machine, name: str
) -> TechniqueClaim:
    if state["unsupported"] is not None:
        return TechniqueClaim(state, ClaimBasis.REFUSED, state["unsupported"])
    nearest: dict[ClaimBasis, set[str]] = defaultdict(set)
    for kind, device in records:
        nearness = _nearness(machine, name, device)
        if nearness is Near.SAME:
            nearest[_OF_KIND[kind]].add(device)
        elif nearness is Near.GENERATION:
            nearest[ClaimBasis.GENERATION].add(device)
    best = next((standing for standing in ClaimBasis if standing in nearest), None)
    if best is not None:
        return TechniqueClaim(state, best, ", ".join(sorted(nearest[best])))
    if state["recipe"] in compiled_recipes(machine.capability):
        return TechniqueClaim(state, ClaimBasis.COMPILED)
    return TechniqueClaim(state, ClaimBasis.DECLARED)


def _nearness(machine: Machine, name: str, device: str) -> Near:
    if not machine.is_gpu or device == CPU:
        return Near.SAME if not machine.is_gpu and device == CPU else Near.OTHER
    return near(name, device)


def records_by_choice(tables: Iterable[EvidenceTable]) -> dict[tuple[object, ...], set[tuple[Kind, str]]]:
    """Return the kinds of tables and the devices on which each choice of a technique was timed."""
    records: dict[tuple[object, ...], set[tuple[Kind, str]]] = defaultdict(set)
    for table in tables:
        if table.kind not in _OF_KIND:
            continue
        device = CPU if table.device == "cpu" else _chip(table.gpu)
        for row in table.rows:
            if row.latency is not None:
                for choice in _choices_of(row.recipe):
                    records[choice].add((table.kind, device))
    return records


def _chip(name: str) -> str:
    gpu = known_gpu(name)
    return name if gpu is None else gpu.chip.name


@cache
def _choices_of(recipe: str) -> tuple[tuple[object, ...], ...]:
    try:
        return tuple(choices(technique) for technique in resolve(recipe))
    except RecipeError:  # of another version of vivace
        return ()
