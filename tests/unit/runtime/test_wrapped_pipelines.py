"""Pipelines whose call only passes its arguments on, or was typed into an interpreter."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from diffusers import StableDiffusionPipeline

import vivace
from tests.families import build, draw
from vivace.errors import Unsupported, UsageError
from vivace.machinery.technique import call_parameters


class PassesOn(StableDiffusionPipeline):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Twice(PassesOn):
    def __call__(self, prompt: Any, style: str = "", **kwargs: Any) -> Any:
        return super().__call__(prompt + style, **kwargs)


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inside


def timed_with_wraps(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(timed(function))


class Decorated(StableDiffusionPipeline):
    __call__ = timed(StableDiffusionPipeline.__call__)


class WithWraps(StableDiffusionPipeline):
    __call__ = timed_with_wraps(StableDiffusionPipeline.__call__)


class ByMethod(StableDiffusionPipeline):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.generate(*args, **kwargs)

    def generate(self, prompt: Any, num_inference_steps: int = 9, **kwargs: Any) -> Any:
        return StableDiffusionPipeline.__call__(
            self, prompt, num_inference_steps=num_inference_steps, **kwargs
        )


class Around:
    """Holds a pipeline; techniques that replace one of its parts must reach the one inside."""

    def __init__(self, pipe: Any) -> None:
        self.inner = pipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class AroundAround(Around):
    pass


def of_kind(kind: Any) -> Any:
    if issubclass(kind, Around):
        pipe = kind(build("sd"))
        return kind(pipe) if kind is AroundAround else pipe
    made = kind(**build("sd").components)
    made.set_progress_bar_config(disable=True)
    return made


KINDS = [PassesOn, Twice, Decorated, WithWraps, ByMethod, Around, AroundAround]


@pytest.mark.parametrize("kind", KINDS)
def test_the_call_is_followed_to_the_loop(kind: Any) -> None:
    made = vivace.apply(of_kind(kind), "scheduler(euler)+steps(2)+cfg_cutoff(0.5)")
    plain = vivace.apply(build("sd"), "scheduler(euler)+steps(2)+cfg_cutoff(0.5)")
    call: dict[str, Any] = {"num_inference_steps": 2}
    assert np.array_equal(draw(made, **call), draw(plain, **call))
    assert made.evidence()["unguided_steps"] == 1
    assert made.defaults["num_inference_steps"] == 2
    assert made.defaults["guidance_scale"] == 7.5
    assert type(made.pipe.scheduler).__name__ == "EulerDiscreteScheduler"
    assert made.warnings == []


def test_what_a_wrapper_names_itself_counts_too() -> None:
    parameters = call_parameters(of_kind(Twice))
    assert list(parameters)[:2] == ["prompt", "style"]
    assert call_parameters(of_kind(ByMethod))["num_inference_steps"].default == 9
    with pytest.raises(UsageError, match="ignores the argument 'stile'"):
        vivace.apply(of_kind(Twice))("a red circle", stile="x")


class Opaque(StableDiffusionPipeline):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return globals()["CALL"](self, *args, **kwargs)


CALL = StableDiffusionPipeline.__call__


def test_what_cannot_be_followed_is_said() -> None:
    made = vivace.apply(of_kind(Opaque), "channels_last")
    assert any("cannot be followed" in warning for warning in made.warnings)
    assert draw(made, num_inference_steps=2).shape == (1, 64, 64, 3)
    with pytest.raises(Unsupported, match=r"steps: .*cannot be followed.*num_inference_steps"):
        vivace.apply(of_kind(Opaque), "steps(2)")
    with pytest.raises(Unsupported, match="guidance: "):
        vivace.apply(of_kind(Opaque), "guidance(3)")


TYPED = """
class Typed(StableDiffusionPipeline):
    def __call__(self, prompt, num_inference_steps=4, guidance_scale=3.0, height=64, width=64, generator=None,
                 output_type="np", **kwargs):
        return CALL(self, prompt, num_inference_steps=num_inference_steps, guidance_scale=guidance_scale,
                    height=height, width=width, generator=generator, output_type=output_type)

class Passes(StableDiffusionPipeline):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)
"""


def typed(name: str) -> Any:
    names: dict[str, Any] = {
        "StableDiffusionPipeline": StableDiffusionPipeline,
        "CALL": CALL,
        "__name__": "__main__",
    }
    exec(TYPED, names)  # noqa: S102
    return of_kind(names[name])


def test_a_class_without_source_is_read_where_it_need_not_be_and_refused_before_anything_is_touched() -> None:
    assert draw(vivace.apply(typed("Typed"), "bf16+steps(2)")).shape == (1, 64, 64, 3)
    made = vivace.apply(typed("Passes"), "steps(2)+cfg_cutoff(0.5)")
    draw(made, num_inference_steps=2)
    assert made.evidence()["unguided_steps"] == 1
    pipe = typed("Typed")
    for recipe in ("bf16+cfg_cutoff(0.5)", "bf16+fuse_qkv", "bf16+deepcache(2)"):
        try:
            vivace.apply(pipe, recipe)
        except Unsupported as error:
            assert "typed into" in str(error)
            assert "load it again" not in str(error)
            assert str(pipe.unet.dtype) == "torch.float32"
        else:
            assert recipe.endswith("deepcache(2)")


@pytest.mark.parametrize("what", ["tiny-sd", None, 3, StableDiffusionPipeline, object(), {"unet": None}])
def test_what_is_no_pipeline_is_an_error_of_usage(what: Any) -> None:
    with pytest.raises(UsageError, match=r"vivace\.apply takes a diffusers pipeline.*vivace\.load"):
        vivace.apply(what)
