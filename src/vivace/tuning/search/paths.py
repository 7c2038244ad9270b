"""Common parts of recipes: the path of the latents, and the options that they would try first."""

from __future__ import annotations

from functools import lru_cache

from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe


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
