"""Which cards a prediction fits, and what to change for one that it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vivace.contract import DENOISERS
from vivace.errors import NoEffect, RecipeError, Unsupported, WorkloadError
from vivace.memory.predict import Prediction, predict
from vivace.memory.weightless import Weightless
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

CARDS_GB = (8, 12, 16, 24, 40, 48, 80, 141)
RESERVE_BYTES = 1_000_000_000
"""Kept free on every card: the CUDA context, which no allocator counts, and gaps between blocks. An assumption."""
_WORTH_IT = 0.99
"""A change that leaves more than this share of the peak is none."""
_SMALLEST = 256
"""Pixels a side below which no smaller picture is proposed."""


@dataclass(frozen=True)
class Change:
    """One step towards fitting, on top of those before it.

    Attributes:
        fills: it lowers nothing, and uses room that the steps before it left, to be faster.
    """

    what: str
    prediction: Prediction
    fills: bool = False


def fits(prediction: Prediction, card_bytes: float) -> bool:
    """Loading and call, with the reserve. A card of N GB counts as N * 10**9 bytes: all have that much."""
    return prediction.needed_bytes + RESERVE_BYTES <= card_bytes


def changes(
    model: Weightless, recipe: Recipe, now: Prediction, card_bytes: float, tell: Callable[[str], None]
) -> list[Change]:
    """What lowers the need, the most harmless first, until it fits: recipes, then the batch, then the size.

    Each stands on those before it; what does not lower the peak is left out. The last one may still not fit. Where one
    of these steps can use what it left free, that is the last.

    Args:
        tell: called with each thing that is tried, which takes seconds.
    """
    found = _smaller_steps(model, recipe, now, card_bytes, tell)
    if not found or not fits(found[-1].prediction, card_bytes):
        return found
    faster = filling(model, found[-1].prediction, card_bytes, tell)
    return found if faster is None else [*found, faster]


def filling(
    model: Weightless, now: Prediction, card_bytes: float, tell: Callable[[str], None]
) -> Change | None:
    """What uses the room that a recipe leaves on a card that it fits, to be faster; None if nothing of it can."""
    recipe = resolve(now.recipe)
    denoiser = next((c for c in now.components if c.name in DENOISERS), None)
    if denoiser is None:
        return None
    free = card_bytes - RESERVE_BYTES - now.stages.get("denoiser", now.peak_bytes)
    free = min(free, denoiser.num_parameters * (4 if "fp32" in denoiser.dtype else 2))
    for technique in recipe:
        variant = technique.using_memory(free)
        if variant is None:
            continue
        tell(variant.text)
        changed = recipe.without(technique).with_(variant)
        after = predict(model, changed, height=now.height, width=now.width, batch=now.batch, text=now.text)
        if fits(after, card_bytes):
            return Change(variant.text, after, fills=True)
    return None


def _smaller_steps(
    model: Weightless, recipe: Recipe, now: Prediction, card_bytes: float, tell: Callable[[str], None]
) -> list[Change]:
    found: list[Change] = []

    def attempt(
        what: str,
        changed: Recipe,
        height: int | None = None,
        width: int | None = None,
        batch: int | None = None,
    ) -> Prediction | None:
        tell(what)
        try:
            after = predict(
                model,
                changed,
                height=height or now.height,
                width=width or now.width,
                batch=batch or now.batch,
                text=now.text,
            )
        except Unsupported:
            other = _fallback(changed)
            return None if other is None else attempt(what, other, height, width, batch)
        except (NoEffect, WorkloadError):
            return None
        if (
            after.needed_bytes > _WORTH_IT * now.needed_bytes
            and after.peak_bytes > _WORTH_IT * now.peak_bytes
        ):
            return None
        made = [technique.text for technique in changed if technique not in recipe.techniques]
        found.append(Change("+".join(made) if len(made) > 1 else what, after))
        return after

    for extra in _worth_trying():
        if fits(now, card_bytes):
            return found
        changed = _replacing(recipe, extra)
        if changed is None or changed == recipe:
            continue
        after = attempt(extra, changed)
        if after is not None:
            now, recipe = after, resolve(after.recipe)
    if now.loading_bytes + RESERVE_BYTES > card_bytes:
        return found  # a smaller picture loads the same weights
    while not fits(now, card_bytes) and now.batch > 1:
        after = attempt(f"batch {now.batch // 2}", recipe, batch=now.batch // 2)
        if after is None:
            break
        now = after
    for height, width in _smaller(now.height, now.width):
        if fits(now, card_bytes):
            break
        now = attempt(f"{width}x{height} pixels", recipe, height=height, width=width) or now
    return found


def _worth_trying() -> list[str]:
    """What techniques propose when memory is short: first those that keep the picture, then by stage."""
    ordered = sorted(TECHNIQUES.values(), key=lambda technique: (not technique.same_picture, technique.stage))
    return [recipe for technique in ordered for recipe in technique.memory_advice.saving]


def _replacing(recipe: Recipe, added: str) -> Recipe | None:
    """The recipe with something in the place of what owns the same slots; None if the two do not go together."""
    try:
        return recipe.replacing(*resolve(added))
    except RecipeError:
        return None


def _fallback(recipe: Recipe) -> Recipe | None:
    """The recipe with a technique's more compatible variant; None if there is none."""
    for technique in recipe:
        for instead in technique.memory_advice.fallback:
            changed = _replacing(recipe, instead)
            if changed is not None and changed != recipe:
                return changed
    return None


def _smaller(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Three quarters and half of each side, in steps of 64 pixels."""
    for share in (0.75, 0.5):
        smaller = tuple(max(64, int(share * side) // 64 * 64) for side in (height, width))
        if min(smaller) >= _SMALLEST:
            yield smaller[0], smaller[1]
