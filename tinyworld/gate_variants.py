"""What the quality gate is tried on: recipes, noise on weights, damage of images, and the halves they are split in."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tinyworld import damage, evaluate
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.recipes.resolve import resolve

PROMPT_SET = "tinyworld"
SET_PICTURES, MOST_PICTURES = 39, 100

_STEPS = {
    "tiny-sd": (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "tiny-flux": (1, 2, 3, 4, 5, 6, 8, 10, 14),
    "tiny-flux-schnell": (1, 2, 3, 8),
}
_GUIDANCE = {"tiny-sd": (0, 6, 8, 10, 20), "tiny-flux": (0, 1, 2, 5), "tiny-flux-schnell": ()}
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    model: {
        "precision": ("int8", "int4", *(("bf16",) if model == "tiny-flux-schnell" else ())),
        "decoder": (
            "tiny_vae",
            *(("int8+tiny_vae", "int4+tiny_vae") if model == "tiny-flux-schnell" else ()),
        ),
        "steps": tuple(f"steps({n})" for n in _STEPS[model]),
        "guidance": tuple(f"guidance({g})" for g in _GUIDANCE[model]),
    }
    for model in _STEPS
}
"""Recipes by model and kind."""
RECIPES["tiny-sd"] |= {
    "cutoff": ("cfg_cutoff(0.2)", "cfg_cutoff(0.6)"),
    "scheduler": ("scheduler(dpmpp_2m)+steps(12)", "scheduler(euler)+steps(8)"),
    "scheduler and steps": tuple(f"scheduler(dpmpp_2m)+steps({n})" for n in (2, 4, 6, 8)),
    "several": ("tiny_vae+steps(3)", "int4+steps(4)", "cfg_cutoff(0.2)+steps(6)"),
}
RECIPES["tiny-flux"] |= {
    "cache": tuple(f"first_block_cache({t})" for t in (0.1, 0.2, 0.3, 0.5, 0.8, 1.5)),
    "cache hits": tuple(f"first_block_cache(hits={h})" for h in (0.5, 0.8, 0.9)),
    "several": ("tiny_vae+steps(3)", "int4+steps(4)"),
}
RECIPES["tiny-flux-schnell"] |= {"several": ("tiny_vae+steps(2)", "int8+steps(3)")}

LATER_RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny-sd": {
        "deepcache": ("deepcache(2)", "deepcache(5)", "deepcache(10)"),
    },
    "tiny-flux": {"pruning": ("prune(0.1)", "prune(0.3)")},
    "tiny-flux-schnell": {"pruning": ("prune(0.1)", "prune(0.2)", "prune(0.4)")},
}
"""Recipes of kinds that were added after the rules were settled."""


@dataclass(frozen=True)
class Variant:
    """One way to get images: a recipe's text, or the name of a damage.

    `sort` is "recipe", "weights" or "images".
    """

    model: str
    kind: str
    name: str
    sort: str

    @property
    def file(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def variants(model: str) -> Iterator[Variant]:
    """Yield everything the gate is tried on; the first is the baseline."""
    yield Variant(model, "baseline", "baseline", "recipe")
    for kind, names in (RECIPES[model] | LATER_RECIPES.get(model, {})).items():
        yield from (Variant(model, kind, resolve(name).text, "recipe") for name in names)
    for kind, noises in damage.WEIGHTS.items():
        chosen = (
            list(noises) if model == "tiny-flux-schnell" else list(noises)[1::2]
        )  # the others take long to draw
        yield from (Variant(model, kind, name, "weights") for name in chosen)
    for kind, damages in image_damages().items():
        yield from (Variant(model, kind, name, "images") for name in damages)


def image_damages() -> dict[str, dict[str, damage.Damage]]:
    """Return all damage of images, by kind and name."""
    return damage.IMAGE | damage.LATER_IMAGE | damage.NEWEST_IMAGE


@cache
def tasks(number: int = MOST_PICTURES) -> list[tuple[str, int]]:
    """Return (prompt, seed) of images: the prompt set at each seed, then held-out captions at one."""
    drawn_tasks = [(prompt, seed) for seed in range(NUM_SEEDS) for prompt in PROMPT_SETS[PROMPT_SET]]
    captions = evaluate.held_out_captions(500)[: MOST_PICTURES - len(drawn_tasks)]
    return (drawn_tasks + [(caption, evaluate.PICTURE_SEED + k) for k, caption in enumerate(captions)])[
        :number
    ]


def num_drawn(variant: Variant) -> int:
    """Return how many images of a variant are drawn. Models of many steps take long: fewer where limits are chosen."""
    is_most = variant.model == "tiny-flux-schnell" or "calibrated" not in half_of(variant.kind)
    return MOST_PICTURES if is_most else SET_PICTURES


KINDS = sorted(
    {kind for kinds in (*RECIPES.values(), damage.WEIGHTS, damage.IMAGE) for kind in kinds},  # type: ignore[attr-defined]
    key=lambda kind: hashlib.sha256(kind.encode()).hexdigest(),
)
CALIBRATED = frozenset(KINDS[: len(KINDS) // 2])
"""The kinds on which limits are chosen; the others are held out."""
LATER = sorted(  # "merging" is of a removed technique, whose rows the record keeps
    {"merging", *(kind for kinds in (*LATER_RECIPES.values(), damage.LATER_IMAGE) for kind in kinds)},  # type: ignore[attr-defined]
    key=lambda kind: hashlib.sha256(kind.encode()).hexdigest(),
)
LATER_CALIBRATED = frozenset(LATER[: len(LATER) // 2])
"""Of the kinds that were added later, those on which the scorer's zooms were chosen."""
NEWEST = frozenset(damage.NEWEST_IMAGE)


def half_of(kind: str) -> str:
    if kind in NEWEST:
        return "newest"
    if kind in LATER:
        return "later, calibrated" if kind in LATER_CALIBRATED else "later"
    return "calibrated" if kind in CALIBRATED else "held out"
