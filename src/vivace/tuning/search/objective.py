"""The goal of a search, and the limits that its recipe must keep."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from vivace.errors import RecipeError, UsageError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques import ALIASES, TECHNIQUES, missing

Goal = Literal["latency", "throughput", "memory", "cost"]


@dataclass(frozen=True)
class Objective:
    """The goal and the limits of a search.

    Attributes:
        goal: "latency" (seconds per image), "throughput" and "cost" (the same, of larger batches), "memory" (peak).
        max_memory_bytes: of the peak during a call; None: no limit.
        max_first_call_s: of the first call, compilation included; None: no limit.
        limits: of the quality gate.
        keep: techniques that every recipe has, by name or as written with their knobs.
        without: names of techniques that no recipe has.
        same_picture_only: search only techniques that keep the image, since quality cannot be judged.
    """

    goal: Goal = "latency"
    max_memory_bytes: float | None = None
    max_first_call_s: float | None = None
    limits: Limits = DEFAULT_LIMITS
    keep: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    same_picture_only: bool = False
    kept: tuple[Technique, ...] = field(init=False, default=())
    kept_names: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        kept: list[Technique] = []
        names = set()
        for text in self.keep:
            name = _name_of(text, "--keep")
            if name is None:
                techniques = tuple(resolve(text).pinned())
                kept += techniques
                names |= {technique.name for technique in techniques}
            else:
                names.add(name)
        without = {_name_of(text, "--without") or _one(text, "--without") for text in self.without}
        if both := sorted(names & without):
            raise UsageError(f"--keep {both[0]} and --without {both[0]} exclude each other; leave out one")
        Recipe.of(kept)  # what is kept must go together
        object.__setattr__(self, "kept", tuple(kept))
        object.__setattr__(self, "kept_names", frozenset(names))
        object.__setattr__(self, "without", tuple(sorted(without)))

    @property
    def measures_memory(self) -> bool:
        return self.goal == "memory"

    def allows(self, technique: Technique) -> bool:
        """Whether a technique may be in a recipe at all."""
        if technique.name in self.without:
            return False
        return technique.facts.same_picture or not self.same_picture_only

    def keeps(self, technique: Technique) -> bool:
        """Whether a technique is one that the user keeps with `keep`."""
        return technique.name in self.kept_names

    def has_kept(self, recipe: Recipe) -> bool:
        """Whether a recipe has every technique of `keep`."""
        has = {technique.name for technique in recipe}
        return self.kept_names <= has and all(technique in recipe.techniques for technique in self.kept)


def _name_of(text: str, flag: str) -> str | None:
    """Return the technique of a plain name; None for a technique with knobs, as an alias such as bf16 is."""
    word = text.strip().lower()
    if word in TECHNIQUES:
        return word
    if word in ALIASES and ALIASES[word][1] is None:
        return ALIASES[word][0]
    if word in ALIASES:
        return None
    if re.fullmatch(r"\w+", word):
        raise UsageError(f"{flag} {text}: {missing(word)}")
    try:
        resolve(text)
    except RecipeError as error:
        raise UsageError(f"{flag} {text}: {error}") from None
    return None


def _one(text: str, flag: str) -> str:
    techniques = tuple(resolve(text))
    if len(techniques) != 1:
        raise UsageError(f"{flag} {text}: give the name of one technique; repeat {flag} for more")
    return techniques[0].name
