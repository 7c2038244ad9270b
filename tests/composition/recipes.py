"""The recipes that are tested: legal pairs and seeded random recipes of the declared techniques, and a few by name."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any, Literal

from tests.targets import target_of
from vivace.architectures.entry import few_steps_of
from vivace.errors import RecipeError
from vivace.machinery.technique import Component, Machine, Target
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

STEPS = {"tiny-sd": 4, "tiny-flux": 8}  # enough for an image
MODELS = tuple(STEPS)
NUM_RANDOM = 300
SEED = 20
EXACT = frozenset(
    {
        "channels_last",
        "fuse_qkv",
        "inference_mode",
        "prompt_cache",
        "vae_slicing",
        "compile",
        "cuda_graph",
    }
)
"""Techniques that compute the same in fp32, except for the order of sums."""

# For knobs whose values worth tuning do not apply to a small model, or whose first value does not.
_SUITED: dict[tuple[str, str], list[Any]] = {
    ("vae_tiling", "tile"): [64],
    ("vae_tiling", "overlap"): [None],
    ("compile", "mode"): ["default"],
    ("compile", "backend"): ["eager"],  # only the named recipes pay for inductor's compile time
    ("first_block_cache", "threshold"): [0.3, 0.2],
    ("teacache", "threshold"): [0.25],  # the default, which allows hits: a threshold needs a fit
    ("teacache", "hits"): [0.5, 0.3],
    ("seacache", "threshold"): [0.3],  # allows hits
    ("seacache", "max_skip"): [5],
    ("seacache", "hits"): [0.5, 0.3],
    ("pyramid_attention", "start"): [600],  # with few steps, the second one, just below 800, decides
    ("magcache", "threshold"): [0.06],
    ("magcache", "max_skip"): [3],
    ("magcache", "retention"): [0.2],
    ("magcache", "hits"): [0.5, 0.3],
    ("guidance", "scale"): [3.0, 1.0, 5.0],
    ("guidance", "true_cfg"): [None],
    ("steps", "steps"): [12, 20],
    ("dtype", "dtype"): ["bf16", "fp16"],
    ("parallel", "mode"): ["cfg"],
    ("attention", "backend"): ["math", "flash"],  # flash is a CPU's default, so it changes nothing
    ("lora", "path"): ["tinyworld/loras/tiny-sd-outlines.safetensors"],  # from the repository's root
    ("lora", "hot"): [False, True],
    ("fused", "attention"): ["bf16"],  # fp8 is a GPU's
}
_OF_FLOW_MODELS: dict[tuple[str, str], list[Any]] = {
    ("scheduler", "sampler"): ["flow_euler"],  # a sampler of the same family; solvers have no other spacing
    ("scheduler", "karras"): [True],
    ("guidance", "true_cfg"): [3.0],  # so that there is guidance to cut
    ("parallel", "mode"): ["all_gather", "ulysses"],  # the forward for one image has one row
    ("lora", "path"): ["tinyworld/loras/tiny-flux-outlines.safetensors"],
}
_PAIRED_ONLY = frozenset({"lora"})
"""Techniques that random recipes lack: they act on the same weights and layers wherever they are, as pairs show."""
_MACHINE = Machine("cpu", "CPU", None, "c++")

Kind = Literal["single", "pair", "random", "named"]


@dataclass(frozen=True)
class Case:
    """One recipe on one model. `names` are its techniques, as paired or chosen."""

    kind: Kind
    model: str
    recipe: str
    names: tuple[str, ...]


_NAMED = (
    ("tiny-sd", "bf16+channels_last+fuse_qkv+compile"),
    ("tiny-sd", "channels_last+compile(blocks=repeated)+scheduler(dpmpp_2m)+steps(12)"),
    ("tiny-sd", "quantize(int8, convolutions=True)+compile"),
    ("tiny-sd", "tiny_vae+prompt_cache+compile@denoiser,vae"),
    ("tiny-sd", "bf16+cfg_cutoff(0.5)+compile(dynamic=True)"),
    ("tiny-flux", "bf16+first_block_cache(0.2)+compile"),
    ("tiny-flux", "quantize(int8)+inference_mode+compile(blocks=repeated)"),
    ("tiny-flux", "bf16+attention(math)+fuse_qkv+compile@denoiser,vae"),
    ("tiny-flux", "bf16+quantize(fp8)@denoiser,text_encoder_2+compile"),
    ("tiny-flux", "bf16+compile(mode=reduce-overhead)"),
)


def named_recipes() -> list[Case]:
    """Return ten recipes that people use, all with the default `compile`, which runs inductor."""
    named = [(model, resolve(recipe)) for model, recipe in _NAMED]
    return [
        Case("named", model, recipe.text, tuple(call.name for call in recipe.techniques))
        for model, recipe in named
    ]


def worth_tuning(name: str, knob: str, model: str) -> list[Any]:
    """Return the values that a knob takes: those worth tuning, else only its default. Pairs use the first."""
    if model == "tiny-flux" and (name, knob) in _OF_FLOW_MODELS:
        return _OF_FLOW_MODELS[name, knob]
    if (name, knob) in _SUITED:
        return _SUITED[name, knob]
    field = TECHNIQUES[name].knobs()[knob]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    tune = list(extra["tune"])
    if field.is_required():
        return tune
    return [field.default, *(value for value in tune if value != field.default)]


def written(name: str, knobs: dict[str, Any], targets: tuple[str, ...] = ()) -> str:
    """Return a technique in recipe notation; without targets, it has its default ones."""
    technique = TECHNIQUES[name]
    chosen: Any = targets or technique.declared.default_targets
    return technique.model_construct(**knobs, targets=chosen).text


def plain(name: str, model: str, targets: tuple[str, ...] = ()) -> str:
    """Return a technique with the first value of each knob."""
    knobs = {knob: worth_tuning(name, knob, model)[0] for knob in TECHNIQUES[name].knobs()}
    return written(name, knobs, targets)


def is_legal(recipe: str) -> bool:
    try:
        resolve(recipe)
    except RecipeError:
        return False
    return True


def pair(first: str, second: str, model: str) -> str | None:
    """Return both techniques on their default targets or, if they own the same slot there, on different components.

    None: they refuse each other by declaration.
    """
    recipe = f"{plain(first, model)}+{plain(second, model)}"
    if is_legal(recipe):
        return resolve(recipe).text
    for a, b in itertools.product(
        TECHNIQUES[first].declared.targetable, TECHNIQUES[second].declared.targetable
    ):
        # The embedded UNet model has no second text encoder.
        if a != b and "text_encoder_2" not in (a, b):
            recipe = f"{plain(first, model, (a,))}+{plain(second, model, (b,))}"
            if is_legal(recipe):
                return resolve(recipe).text
    return None


def legal_pairs() -> list[Case]:
    """Return every unordered pair on each model, including each technique with itself on different components."""
    return [
        Case("pair", model, recipe, (first, second))
        for model in MODELS
        for first, second in itertools.combinations_with_replacement(TECHNIQUES, 2)
        if (recipe := pair(first, second, model)) is not None
    ]


def refusing_pairs() -> list[tuple[str, str]]:
    """Return the pairs of different techniques that own the same slot on all targets that they share."""
    return [
        (first, second)
        for first, second in itertools.combinations(TECHNIQUES, 2)
        if all(pair(first, second, model) is None for model in MODELS)
    ]


def random_recipes(count: int = NUM_RANDOM, seed: int = SEED) -> list[Case]:
    """Return legal recipes of 3 to 6 techniques, alternating between the models, all different.

    Drawn from what neither a CPU nor the model refuses in a technique alone, so that nearly all of them can run; how
    techniques refuse company is the pairs' subject.
    """
    rng = random.Random(seed)
    cases: dict[tuple[str, str], Case] = {}
    while len(cases) < count:
        model = MODELS[len(cases) % len(MODELS)]
        names = rng.sample(sorted(TECHNIQUES.keys() - _PAIRED_ONLY), rng.randint(3, 6))
        parts = [_random_call(name, model, rng) for name in names]
        if None in parts or not is_legal(recipe := "+".join(part for part in parts if part)):
            continue
        text = resolve(recipe).text
        cases.setdefault((model, text), Case("random", model, text, tuple(sorted(names))))
    return list(cases.values())


def _random_call(name: str, model: str, rng: random.Random) -> str | None:
    """Return a technique with random knobs, in a third of cases on random targets; None if it cannot work alone."""
    technique = TECHNIQUES[name]
    knobs = {knob: rng.choice(worth_tuning(name, knob, model)) for knob in technique.knobs()}
    targets: tuple[Component, ...] = technique.declared.default_targets
    if technique.declared.targetable and rng.random() < 1 / 3:
        chosen = rng.sample(technique.declared.targetable, rng.randint(1, len(technique.declared.targetable)))
        targets = tuple(c for c in technique.declared.targetable if c in chosen)
    recipe = written(name, knobs, targets)
    return recipe if is_legal(recipe) and works_alone(recipe, model) else None


@functools.cache
def works_alone(recipe: str, model: str) -> bool:
    (technique,) = resolve(recipe)
    target = _target(model)
    has_target = bool(target.modules(technique.targets) or not technique.targets)
    return has_target and technique.unsupported(target) is None


@functools.cache
def _target(model: str) -> Target:
    from vivace.models import find_model, load_pipeline

    located = find_model(model)
    return target_of(
        machine=_MACHINE,
        pipe=load_pipeline(located, "cpu"),
        load_tiny_vae=lambda: None,
        distillations=few_steps_of(located.entry),
    )


def members(case: Case) -> list[Case]:
    """Return the techniques of a recipe, each alone, with its own knobs and targets."""
    return [
        Case("single", case.model, technique.text, (technique.name,)) for technique in resolve(case.recipe)
    ]
