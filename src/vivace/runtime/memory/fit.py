"""Find the GPUs that a prediction fits, and the changes that make it fit a smaller one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from vivace.errors import NoEffect, RecipeError, Unsupported, WorkloadError
from vivace.machinery.technique import DENOISERS, TEXT_ENCODERS, Stage
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import ComponentBytes, Prediction
from vivace.runtime.memory.remembered import Quantised, network, predicted, shipped
from vivace.runtime.memory.weightless import Weightless
from vivace.techniques import TECHNIQUES
from vivace.techniques.offload import Offload

CARDS_GB = (8, 12, 16, 24, 40, 48, 80, 141)
RESERVE_BYTES = 1_200_000_000
"""Bytes kept free on every GPU, for the CUDA context, which the allocator does not count, and fragmentation.

A context has 0.65 GB (results/memory-caps.jsonl). With 0.39 GB beside it and the predicted peak, Z-Image-Turbo ran out
of memory.
"""
_WORTH_IT = 0.99
"""Share of the memory that a change must save to count."""
_SMALLEST = 256
"""Smallest proposed side, pixels."""
_FREE, _UNKNOWN = 1.0, 0.9
"""Assumed speed-up of a change of precision or of the VAE only, and of other changes without a record."""
LARGEST_ENCODER = "text_encoder_2"
"""The name of the largest text encoder in the recipes that techniques propose, as in FLUX and SDXL."""
SpeedOf = Callable[[str], float | None]
Scheme = Literal["int8", "fp8", "nf4"]
Offloading = Literal["model", "group"]
_UNKNOWN_KERNELS: dict[Scheme, tuple[float, float]] = {
    "int8": (0.6, 0.03),
    "fp8": (0.6, 0.03),
    "nf4": (0.4, 0.05),
}
"""For a network that the catalogue lacks: its quantised bytes, and its further needs while it computes, as shares of
its original bytes. Most networks need less."""
_LARGEST_LAYER = 0.03
"""Bytes of a network's largest layer, as a share of all, and at least those of an embedding."""
_EMBEDDING_BYTES = 3e8
_MARGIN = 1.01
_FP8_BESIDE = 0.02
"""Extra memory of a denoiser's layers in fp8 over int8, as a share of its bytes: their quantised inputs."""
_STAGES = {"denoiser": "denoiser", "vae": "vae", "vae encoder": "vae", "text encoders": "text"}


# `vivace.runtime.memory.predict` runs a recipe on a pipeline without weights, which takes seconds. Which of a dozen
# recipes fit a card follows, to a few percent, from one such prediction: the bytes of each component by its precision,
# where each stage of a call keeps them, and what a stage needs beside them.
@dataclass(frozen=True)
class Saving:
    """A recipe that saves memory, in its parts.

    Attributes:
        denoiser, encoder: how the denoiser and the largest text encoder are quantised.
        vae_share: of the VAE's activations that are left.
    """

    recipe: str
    denoiser: Scheme | None = None
    encoder: Scheme | None = None
    offloading: Offloading | None = None
    vae_share: float = 1.0


@dataclass(frozen=True)
class Need:
    """Estimated bytes on a GPU, as in a `Prediction`."""

    peak_bytes: int
    loading_bytes: int
    held_bytes: int
    denoiser_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the GPU."""
        return max(self.peak_bytes, self.loading_bytes)


@dataclass(frozen=True)
class RecipeChange:
    """One change of a series, applied after those before it.

    Attributes:
        fills: the change does not lower the memory; it uses what is still free to be faster.
    """

    what: str
    prediction: Prediction
    fills: bool = False


def fits(prediction: Prediction, card_bytes: float) -> bool:
    """Whether loading and calling fit, with the reserve. A GPU of N GB counts as N * 10**9 bytes, which every such GPU
    has."""
    return prediction.needed_bytes + RESERVE_BYTES <= card_bytes


def changes(
    model: Weightless,
    recipe: Recipe,
    now: Prediction,
    card_bytes: float,
    on_attempt: Callable[[str], None],
    speed_of: SpeedOf = lambda recipe: None,
) -> list[RecipeChange]:
    """Return changes that lower the memory until it fits: first techniques, then the batch, then the image size.

    Each change is applied after those before it. Techniques that keep the image come first, and of those the ones that
    cost the least time. Changes that do not lower the memory are left out. The result may still not fit. If it fits and
    a technique can use the free memory to be faster, that is the last change.

    Args:
        now: the prediction of `recipe`.
        card_bytes: memory of the GPU.
        on_attempt: called with the name of each change before it is tried, which takes seconds.
        speed_of: returns how many times as fast a recipe is as the baseline, None if that is not known.
    """
    saving = _saving_changes(model, recipe, now, card_bytes, on_attempt, speed_of)
    if not saving or not fits(saving[-1].prediction, card_bytes):
        return saving
    faster = use_free_memory(model, saving[-1].prediction, card_bytes, on_attempt)
    return saving if faster is None else [*saving, faster]


def use_free_memory(
    model: Weightless, now: Prediction, card_bytes: float, on_attempt: Callable[[str], None]
) -> RecipeChange | None:
    """Return a change that uses free memory of the GPU to be faster; None if no technique of the recipe can."""
    recipe = resolve(now.recipe)
    denoiser = next((c for c in now.components if c.name in DENOISERS), None)
    if denoiser is None:
        return None
    free = card_bytes - RESERVE_BYTES - now.stages.get("denoiser", now.peak_bytes)
    free = min(free, denoiser.num_parameters * (4 if "fp32" in denoiser.dtype else 2))
    for technique in recipe:
        variant = technique.using_memory(free) if isinstance(technique, Offload) else None
        if variant is None:
            continue
        on_attempt(variant.text)
        changed = recipe.without(technique).with_(variant)
        after = _again(model, changed, now)
        if fits(after, card_bytes):
            return RecipeChange(variant.text, after, fills=True)
    return None


def _again(model: Weightless, recipe: Recipe, before: Prediction, **size: int) -> Prediction:
    """Return the prediction of another recipe, for the call of an earlier one with another size or batch."""
    call = {name: getattr(before, name) for name in ("height", "width", "batch", "text", "task")}
    return predicted(model, recipe, **call | size)


def _saving_changes(
    model: Weightless,
    recipe: Recipe,
    now: Prediction,
    card_bytes: float,
    on_attempt: Callable[[str], None],
    speed_of: SpeedOf,
) -> list[RecipeChange]:
    changes: list[RecipeChange] = []

    def attempt(what: str, changed: Recipe, **size: int) -> Prediction | None:
        on_attempt(what)
        try:
            after = _again(model, changed, now, **size)
        except Unsupported:
            other = _fallback(changed)
            return None if other is None else attempt(what, other, **size)
        except (NoEffect, WorkloadError):
            return None
        if (
            after.needed_bytes > _WORTH_IT * now.needed_bytes
            and after.peak_bytes > _WORTH_IT * now.peak_bytes
        ):
            return None
        added = [technique.text for technique in changed if technique not in recipe.techniques]
        changes.append(RecipeChange("+".join(added) if len(added) > 1 else what, after))
        return after

    for extra in _saving_recipes(speed_of, largest_encoder(now)):
        if fits(now, card_bytes):
            return changes
        if _touches_vae_only(extra) and now.peak_stage != "vae":
            continue
        changed = _replacing(recipe, extra)
        if changed is None or changed == recipe:
            continue
        after = attempt(extra, changed)
        if after is not None:
            now, recipe = after, resolve(after.recipe)
    if now.loading_bytes + RESERVE_BYTES > card_bytes:
        return changes  # a smaller image needs the same weights
    while not fits(now, card_bytes) and now.batch > 1:
        after = attempt(f"batch {now.batch // 2}", recipe, batch=now.batch // 2)
        if after is None:
            break
        now = after
    for height, width in _smaller_sizes(now.height, now.width):
        if fits(now, card_bytes):
            break
        now = attempt(f"{width}x{height} pixels", recipe, height=height, width=width) or now
    return changes


def _saving_recipes(speed_of: SpeedOf, encoder: str | None) -> list[str]:
    """Return the recipes that techniques propose to save memory: those that keep the image first, then the faster.
    Where a recipe is known to be faster together with `compile`, it is proposed so."""
    recipes = []
    ordered = sorted(
        TECHNIQUES.values(),
        key=lambda technique: (not technique.declared.same_picture, technique.declared.stage),
    )
    for technique in ordered:
        for declared in technique.declared.saves_memory:
            # For the model's largest text encoder; without one, for the other targets.
            name, instead = (f",{LARGEST_ENCODER}", "") if encoder is None else (LARGEST_ENCODER, encoder)
            recipe = declared.replace(name, instead)
            speed = speed_of(recipe)
            together = f"{recipe}+compile"
            compiled = speed_of(together) if speed is not None else None
            if speed is not None and compiled is not None and compiled > speed:
                recipe, speed = together, compiled
            elif speed is None:
                speed = _FREE if _costs_no_time(recipe) else _UNKNOWN
            recipes.append((not technique.declared.same_picture, -speed, recipe))
    return [recipe for *_, recipe in sorted(recipes, key=lambda entry: entry[:2])]


def _costs_no_time(recipe: str) -> bool:
    return _touches_vae_only(recipe) or all(t.facts.stage is Stage.PRECISION for t in resolve(recipe))


def _touches_vae_only(recipe: str) -> bool:
    return all(technique.targets == ("vae",) for technique in resolve(recipe))


def _replacing(recipe: Recipe, added: str) -> Recipe | None:
    """Return the recipe with `added` in place of the techniques that own the same slots. If that is invalid, a
    technique of the recipe is replaced by its fallback. None if that is invalid too."""
    for base in (recipe, _fallback(recipe)):
        try:
            if base is not None:
                return base.replacing(*resolve(added))
        except RecipeError:
            continue
    return None


def _fallback(recipe: Recipe) -> Recipe | None:
    for technique in recipe:
        for instead in technique.facts.fallback:
            changed = recipe.replacing(*resolve(instead))
            if changed != recipe:
                return changed
    return None


def _smaller_sizes(height: int, width: int) -> Iterator[tuple[int, int]]:
    for share in (0.75, 0.5):
        smaller = tuple(max(64, int(share * side) // 64 * 64) for side in (height, width))
        if min(smaller) >= _SMALLEST:
            yield smaller[0], smaller[1]


def largest_encoder(prediction: Prediction) -> str | None:
    """Return the name of the text encoder with the most bytes: T5, or a language model; None if there is none."""
    encoders = [part for part in prediction.components if part.name in TEXT_ENCODERS]
    return max(encoders, key=lambda part: part.num_bytes).name if encoders else None


def need_of(saving: Saving, published: Prediction) -> Need:
    """Return the memory that a recipe needs."""
    encoder = largest_encoder(published)
    held: dict[str, float] = {"denoiser": 0.0, "vae": 0.0, "text": 0.0, "other": 0.0}
    largest_text = 0.0
    beside_of = {"denoiser": 0.0, "text": 0.0}
    loading_beside = 0.0
    for part in published.components:
        kind, scheme = _kind(part), None
        if kind == "denoiser":
            scheme = saving.denoiser
        elif part.name == encoder:
            scheme = saving.encoder
        num_bytes = float(part.num_bytes)
        if scheme is not None:
            after = _quantised(part, scheme)
            num_bytes *= after.share
            more = _FP8_BESIDE * part.num_bytes if scheme == "fp8" else 0.0
            beside_of[kind] = max(beside_of[kind], after.beside_bytes + more)
            loading_beside = max(loading_beside, after.loading_bytes)
        held[kind] += num_bytes
        largest_text = max(largest_text, num_bytes if kind == "text" else 0.0)
    everything = sum(held.values())
    resident = {
        None: dict.fromkeys(held, everything),
        "model": held | {"text": largest_text},
        "group": {kind: min(num_bytes, _layer(num_bytes)) for kind, num_bytes in held.items()}
        | {"vae": held["vae"]},
    }[saving.offloading]
    peaks = [resident["denoiser"] if saving.offloading == "model" else 0.0]
    for stage, peak in published.stages.items():
        kind = _STAGES.get(stage, "other")
        beside = max(0.0, peak - published.model_bytes)
        if kind == "vae":
            beside *= saving.vae_share
        elif kind in ("denoiser", "text"):
            beside += beside_of[kind]
        peaks.append(resident[kind] + beside)
    is_changed = saving.denoiser is not None or saving.encoder is not None or saving.offloading is not None
    margin = _MARGIN if is_changed else 1.0
    loading = everything if saving.offloading is None else 0.0
    if is_changed:  # layer by layer, from host memory
        loading += max(loading_beside, _layer(max(part.num_bytes for part in published.components)))
    return Need(
        peak_bytes=round(margin * max(peaks)),
        loading_bytes=round(margin * loading),
        held_bytes=round(everything),
        denoiser_bytes=round(held["denoiser"]),
    )


def _quantised(part: ComponentBytes, scheme: Scheme) -> Quantised:
    """Return a network with its Linear layers quantised. fp8 takes as much as int8."""
    by_scheme = shipped().quantised.get(network(part))
    if by_scheme is not None:
        return by_scheme["int8" if scheme == "fp8" else scheme]
    share, beside = _UNKNOWN_KERNELS[scheme]
    layer = round(_layer(part.num_bytes))
    return Quantised(share=share, beside_bytes=round(beside * part.num_bytes), loading_bytes=layer)


def _kind(part: ComponentBytes) -> str:
    if part.name in DENOISERS:
        return "denoiser"
    return "vae" if part.name == "vae" else "text" if part.name in TEXT_ENCODERS else "other"


def _layer(num_bytes: float) -> float:
    return max(_LARGEST_LAYER * num_bytes, min(_EMBEDDING_BYTES, num_bytes))
