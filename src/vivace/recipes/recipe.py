"""A recipe: techniques in the order in which they are applied, checked against each other, and editable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from pydantic import ValidationError

from vivace.errors import RecipeError
from vivace.foundation.spec.input_errors import expectation_of
from vivace.foundation.spec.recipe_syntax import BASELINE, RecipeSpec, TechniqueCall
from vivace.foundation.spec.sizes import Size
from vivace.machinery.technique import COMPONENTS, Rule, Technique
from vivace.techniques import TECHNIQUES, missing
from vivace.techniques.lora import Lora


@dataclass(frozen=True)
class Conflict:
    """Why two techniques of a recipe do not go together; `technique` is the one that refuses."""

    technique: Technique
    other: Technique
    reason: str


@dataclass(frozen=True)
class Recipe:
    """Techniques in stage order, without conflicts.

    Made by `resolve(text)`, by `Recipe.of(techniques)`, from a Record by `Recipe.from_spec`, or by editing another one.
    """

    techniques: tuple[Technique, ...] = ()

    @classmethod
    def of(cls, techniques: Iterable[Technique]) -> Recipe:
        """Put techniques in order.

        Raises:
            RecipeError: two of them conflict.
        """
        ordered = in_order(techniques)
        conflict = next(conflicts(ordered), None)
        if conflict is not None:
            text = "+".join(technique.text for technique in ordered)
            raise RecipeError(conflict.reason, text, text.index(conflict.technique.text))
        return cls(ordered)

    @classmethod
    def from_spec(cls, spec: RecipeSpec) -> Recipe:
        """Return the recipe of a Trial or Record.

        Raises:
            RecipeError: this version of vivace lacks a technique or a knob of it.
        """
        return cls.of(_technique(call, spec.text) for call in spec.techniques)

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def text(self) -> str:
        """The canonical form, which is the recipe's identity."""
        return "+".join(technique.text for technique in self.techniques) or BASELINE

    @property
    def spec(self) -> RecipeSpec:
        """The recipe as a Trial stores it."""
        return RecipeSpec(
            text=self.text,
            techniques=tuple(technique.call for technique in self.techniques),
            same_picture=self.same_picture,
        )

    @property
    def same_picture(self) -> bool:
        """Whether every technique only reorders or rounds the arithmetic."""
        return all(technique.facts.same_picture for technique in self.techniques)

    @property
    def is_baseline(self) -> bool:
        return not self.techniques

    @property
    def announced_sizes(self) -> tuple[Size, ...]:
        """Sizes of images that its techniques prepare one by one, the smallest first."""
        return tuple(dict.fromkeys(size for t in self.techniques for size in t.facts.announced_sizes))

    @property
    def loads_from_host(self) -> bool:
        """Whether the model is loaded into host memory first, so that the original need not fit the GPU.

        A technique that runs prompts before the model is made smaller needs it on the GPU as it is.
        """
        return any(t.facts.loads_from_host for t in self.techniques) and not any(
            t.facts.needs_prompts for t in self.techniques
        )

    def pinned(self) -> Recipe:
        """Return the recipe with the identity of every file that a technique reads (see `Lora.pinned`).

        Raises:
            UnusableModel, Unsupported: a file cannot be read or found.
        """
        techniques = in_order(t.pinned() if isinstance(t, Lora) else t for t in self.techniques)
        return self if techniques == self.techniques else Recipe(techniques)

    def __iter__(self) -> Iterator[Technique]:
        return iter(self.techniques)

    def __str__(self) -> str:
        return self.text

    def with_(self, *added: Technique) -> Recipe:
        """Return the recipe with more techniques.

        Raises:
            RecipeError: one of them conflicts with another.
        """
        return Recipe.of((*self.techniques, *added))

    def without(self, *removed: str | Technique) -> Recipe:
        """Return the recipe without some techniques: a name removes all of that name, a value only that one."""
        return Recipe(tuple(t for t in self.techniques if t.name not in removed and t not in removed))

    def replacing(self, *added: Technique) -> Recipe:
        """Return the recipe with techniques in the place of those that own the same slots.

        Raises:
            RecipeError: one of them conflicts with what remains.
        """
        slots = frozenset().union(*(technique.slots for technique in added))
        return Recipe.of((*(t for t in self.techniques if not slots & t.slots), *added))


def in_order(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Return techniques sorted by place, then target, then name; those that differ only in knobs by their text."""
    return tuple(sorted(techniques, key=lambda t: (t.facts.stage, t.targets, t.name, t.text)))


def conflicts(techniques: tuple[Technique, ...]) -> Iterator[Conflict]:
    """Yield pairs that own the same slot of a component, or where one excludes a trait of the other."""
    owners: dict[tuple[str, str], int] = {}
    for position, technique in enumerate(techniques):
        for slot, target in sorted(technique.slots):
            owner = owners.setdefault((slot, target), position)
            if owner != position:  # the same object twice is a conflict, too
                other = techniques[owner]
                apart = ", or give them different targets with @" if technique.targets else ""
                reason = f"{other.text} and {technique.text} both set the {slot} of {target}; keep one{apart}"
                yield Conflict(technique, other, reason)
    for technique in techniques:
        for rule in technique.facts.excludes:
            for other in techniques:
                if other is not technique and _breaks(rule, technique, other, techniques):
                    reason = f"{technique.text} does not go with {other.text}: {rule.because}"
                    yield Conflict(technique, other, reason)


def _breaks(rule: Rule, technique: Technique, other: Technique, all_: tuple[Technique, ...]) -> bool:
    if rule.trait not in other.facts.provides or (
        rule.earlier_only and other.facts.stage >= technique.facts.stage
    ):
        return False
    shared = set(_where(technique)) & set(_where(other))
    if rule.components:
        shared &= set(rule.components)
    if rule.unless is not None:
        lifted = [t for t in all_ if rule.unless in t.facts.provides]
        shared -= {component for t in lifted for component in _where(t)}
    return bool(shared)


def _where(technique: Technique) -> Iterable[str]:
    """Return the components that a technique works on; a technique of the call works on all."""
    return technique.targets or COMPONENTS


def _technique(call: TechniqueCall, text: str) -> Technique:
    kind = TECHNIQUES.get(call.name)
    try:
        if kind is not None:
            return kind(**cast("dict[str, Any]", {**call.knobs, "targets": call.targets}))
    except ValidationError as error:
        problem = error.errors()[0]
        knob = str(problem["loc"][0]) if problem["loc"] else "its knobs"
        raise RecipeError(
            f"this version of vivace has another {call.name}: {knob} {expectation_of(error)}", text, 0
        ) from None
    raise RecipeError(missing(call.name), text, max(0, text.find(call.name)), len(call.name))
