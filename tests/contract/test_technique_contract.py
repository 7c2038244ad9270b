"""The contract that every registered technique keeps. A new technique is tested as soon as it is registered."""

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.families import load
from tests.forked_peers import forked_peers
from tests.targets import target_of
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.technique import COMPONENTS, Arithmetic, Machine, Stage, Technique
from vivace.models import find_model
from vivace.recipes.describe import states
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session
from vivace.techniques import ALIASES, TECHNIQUES

STEPS = {"tiny-sd": 4, "tiny-flux": 8}  # enough for an image
PROMPT = "a red circle above a blue square"
ALL = sorted(TECHNIQUES)

LORAS = (Path(__file__).parents[2] / "tinyworld" / "loras").as_posix()

# For knobs whose values worth tuning do not apply to a small model.
SUITED = {
    "vae_tiling": ["vae_tiling(64)"],
    "teacache": [
        "teacache(hits=0.3)",
        "teacache(hits=0.5)",
    ],  # a threshold needs a fit, which tiny models do not have
    "magcache": ["magcache(hits=0.3)", "magcache(hits=0.5)"],
    "seacache": ["seacache(1.0)", "seacache(hits=0.5)"],  # with few steps, each changes a lot
    "lora": [
        f"lora('{LORAS}/{model}-outlines.safetensors'{hot})"
        for model in ("tiny-sd", "tiny-flux")
        for hot in ("", ", hot=True")
    ],
}
LEAST_DB = {
    "quantize(int4)": 20,  # sixteen values a weight
    "quantize(nf4)": 20,
    "quantize(nvfp4)": 14,  # sixteen values a weight and an input
    "quantize(fp8_static)": 20,  # one scale for all inputs of a layer
    "fused(fp8)": 20,  # one scale for all inputs of a layer, as loose as a bound
    "quantize(q5_1, backend=gguf)": 20,
    "quantize(q5_0, backend=gguf)": 20,
    "quantize(q4_1, backend=gguf)": 15,
    "quantize(q4_0, backend=gguf)": 15,
}
# Choices that take inductor minutes to compile; they have separate tests.
COMPILED = {("attention", "flex")}
# Techniques for batches generate one.
PROMPTS: dict[str, str | list[str]] = {"vae_slicing": [PROMPT, "a blue square"]}


def variants(technique: type[Technique]) -> list[str]:
    """Return recipes that exercise a technique: each choice of its first knob, or a value worth tuning."""
    if technique.name in SUITED:
        return SUITED[technique.name]
    if not technique.knobs():
        return [technique.name]
    field = next(iter(technique.knobs().values()))
    choices = [c for c in get_args(field.annotation) if isinstance(c, str)]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    tune = extra["tune"]
    values = choices or list(tune)
    values = [v for v in values if (technique.name, v) not in COMPILED]
    # The tests of compile pay for inductor's compile time.
    suffix = ", backend=eager" if technique.name == "compile" else ""
    if suffix:
        values = ["default"]
    return [
        _written(technique, value) if not suffix else f"{technique.name}({value}{suffix})" for value in values
    ]


def _written(technique: type[Technique], value: Any) -> str:
    """Return the technique with this value of its first knob, and the library that the value belongs to, if any."""
    plain = f"{technique.name}({value}"
    texts = [str(state["recipe"]) for state in states(technique, Machine("cpu", "CPU", None, None))]
    return next((recipe for recipe in texts if recipe.startswith((f"{plain})", f"{plain}, "))), f"{plain})")


RECIPES = [(name, recipe) for name in ALL for recipe in variants(TECHNIQUES[name])]


FAMILIES = ("tiny-sd", "tiny-flux")


def open_model(model: str, recipe: str) -> Session:
    return session_of(
        load(model), find_model(model), resolve(recipe), "cpu", {"num_inference_steps": STEPS[model]}
    )


def draw(session: Session, prompt: str | list[str] = PROMPT, **call: Any) -> np.ndarray:
    torch.set_num_threads(1)
    count = 1 if isinstance(prompt, str) else len(prompt)
    generators = [torch.Generator().manual_seed(k) for k in range(count)]
    result = session(prompt, generator=generators if count > 1 else generators[0], output_type="np", **call)
    return np.asarray(result.images)


@functools.cache
def reference(model: str) -> np.ndarray:
    return draw(open_model(model, "baseline"))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a - b) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)


def kinds(pipe: Any) -> set[tuple[str, torch.dtype]]:
    """Return how the weights of a pipeline are stored: classes and dtypes."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return {(type(p.data).__name__, p.dtype) for module in modules for p in module.parameters()}


@functools.cache
def own_kinds(model: str) -> set[tuple[str, torch.dtype]]:
    """Return how a model's weights are stored before a technique is applied."""
    return kinds(load(model))


@pytest.mark.parametrize("name", ALL)
def test_declaration(name: str) -> None:
    technique = TECHNIQUES[name]
    assert technique.name == name
    assert name == re.sub(r"(?<!^)(?=[A-Z])", "_", technique.__name__).lower(), "class = its CamelCase"
    assert sys.modules[technique.__module__].__name__ == f"vivace.techniques.{name}", "file = registry name"
    assert isinstance(technique.declared.stage, Stage)
    assert technique.declared.owns
    assert technique.summary
    assert isinstance(technique.declared.same_picture, bool)
    assert set(technique.declared.default_targets) <= set(technique.declared.targetable) <= set(COMPONENTS)
    parent = technique.__mro__[1]
    assert parent is Technique or (parent.__mro__[1] is Technique and "name" not in vars(parent)), "final"
    essay = inspect.getdoc(sys.modules[technique.__module__]) or ""
    assert "Why:" in essay
    assert "Source:" in essay


@pytest.mark.parametrize("name", ALL)
def test_knobs_have_descriptions_and_values_to_try(name: str) -> None:
    for key, field in TECHNIQUES[name].knobs().items():
        assert field.description, key
        if field.annotation in (int, float):
            assert field.metadata, f"{key} has no range"


@pytest.mark.parametrize("name", ALL)
def test_support_can_be_judged_from_the_machine_alone(name: str) -> None:
    machines = [
        Machine("cpu", "CPU", None, None),
        Machine("cpu", "CPU", None, "/usr/bin/c++"),
        Machine("cuda", "old GPU", (7, 0), None),
        Machine("cuda", "H200", (9, 0), None),
    ]
    for machine in machines:
        for recipe in variants(TECHNIQUES[name]):
            (technique,) = resolve(recipe)
            reason = technique.unsupported(target_of(machine=machine))
            assert reason is None or len(reason) > 20, "with a reason"


def test_no_technique_names_another() -> None:
    for name, technique in TECHNIQUES.items():
        code = inspect.getsource(technique)
        for other in TECHNIQUES.values():
            if other is not technique:
                assert f"import {other.__name__}" not in code, name


def test_aliases_stand_for_real_recipes() -> None:
    for alias, (name, value) in ALIASES.items():
        assert resolve(alias) == resolve(name if value is None else f"{name}({value})")
        assert alias not in TECHNIQUES


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(("name", "recipe"), RECIPES, ids=[r for _, r in RECIPES])
@pytest.mark.diagonal
@pytest.mark.slow(
    "dtype(fp16)*",
    "parallel*",
    "compile*tiny-sd",
    "prune(0.2)*",
    "quantize(nf4)*",
    "quantize(nvfp4)*",
    "scheduler(ddpm)*",
    "scheduler(lms)*",
    "scheduler(tcd)*",
    "scheduler(deis)*",
    "scheduler(sa_solver)*",
    "scheduler(dpm2)*",
    "scheduler(dpmpp_2s)*",
    "scheduler(unipc)*",
    "quantize(fp8_weight)*",
    "quantize(mxfp8)*",
    "quantize(int4)-*",
    "steps(8)*",
    "steps(20)*",
    "pyramid_attention(3)*",
    "first_block_cache(0.2)*",
    "cfg_cutoff(0.4)*",
    "cfg_cutoff(0.8)*",
    "guidance(5.0)*",
    "taylorseer(3)*",
    "taylorseer(4)*",
    "faster_cache(5)*",
    "dual_block_cache(0.3)*",
    "deepcache(5)*",
)
@pytest.mark.exhaustive("dtype(fp16)-*", "parallel(cfg)-tiny-sd", "parallel(ulysses)-tiny-flux")
def test_a_technique_works_or_has_a_reason(name: str, recipe: str, model: str) -> None:
    try:
        session = open_model(model, recipe)
    except Unsupported as error:
        assert str(error).startswith(f"{name}: ")
        assert len(str(error)) > len(name) + 20
        return
    except NoEffect as error:
        assert error.already_so, "every technique has an effect, unless the model is already in that state"
        return
    with session:
        check_picture(session, name, recipe, model)


def check_picture(session: Session, name: str, recipe: str, model: str) -> None:
    (effect,) = session.effects.values()
    assert effect, "a technique reports what it changed"
    if kinds(session.pipe) - own_kinds(model):
        (technique,) = resolve(recipe)
        assert technique.facts.arithmetic.weights != Arithmetic.weights, "it declares how weights are stored"
    picture = draw(session, PROMPTS.get(name, PROMPT))[:1]
    reason = session.refuted({})
    if reason is not None:
        # A cache with a small threshold and few steps, or one image of a model without an unconditional row or call.
        assert any(why in reason for why in ("never hit", "no forward had two rows", "made no unconditional"))
        assert np.array_equal(picture, reference(model))
        return
    assert np.isfinite(picture).all()
    assert picture.std() > 0.005, "not flat"
    if TECHNIQUES[name].declared.same_picture:
        assert psnr(picture, reference(model)) > LEAST_DB.get(recipe, 30), (
            "same_picture: only rounded or reordered"
        )
    elif name != "tiny_vae":
        assert not np.array_equal(picture, reference(model)), (
            "it declares that it changes the image, and it does"
        )


@pytest.mark.parametrize("name", ALL)
def test_it_conflicts_with_itself(name: str) -> None:
    from vivace.errors import RecipeError

    recipe = variants(TECHNIQUES[name])[0]
    with pytest.raises(RecipeError, match="keep one"):
        resolve(f"{recipe}+{recipe}")
