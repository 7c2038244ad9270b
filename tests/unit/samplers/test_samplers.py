"""Every sampler against a model that knows the image: it must end there, from anywhere in its schedule, or say why not.

The model predicts exactly, for one image. Then every solver has one right answer, and what is left is its own fault.
"""

import contextlib
import copy
import functools
import inspect
from typing import Any, get_args

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

import vivace
from tests.conditioned import as_pipeline
from tests.families import build, draw
from vivace.errors import NoEffect, Unsupported, UsageError
from vivace.machinery.samplers import refused_steps
from vivace.techniques.scheduler import Scheduler

NAMES = [
    name
    for name in get_args(Scheduler.model_fields["sampler"].annotation)
    if name not in ("edm_euler", "edm_dpmpp_2m", "flow_euler", "flow_heun", "flow_lcm", "dpmpp_sde")
]
COUNTS = (1, 2, 3, 4, 5, 6, 60, 1000)
IMAGE = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))


def exact(scheduler: Any, noisy: torch.Tensor, timestep: Any) -> torch.Tensor:
    """Return what a perfect model of one image predicts, also between two of its timesteps."""
    share = scheduler.alphas_cumprod
    levels = torch.log(((1 - share) / share) ** 0.5)
    low = min(int(timestep), len(levels) - 1)
    broken = float(timestep) - low
    sigma = torch.exp(levels[low] * (1 - broken) + levels[min(low + 1, len(levels) - 1)] * broken)
    scale = 1 / (1 + sigma**2) ** 0.5
    noise = (noisy - scale * IMAGE) / (sigma * scale)
    kind = scheduler.config.prediction_type
    if kind == "sample":
        return IMAGE
    return noise if kind == "epsilon" else scale * noise - sigma * scale * IMAGE


def left(scheduler: Any, steps: int, strength: float | None = None) -> float:
    """Return how far, root mean square, the sampler ends from the image."""
    scheduler.set_timesteps(steps, device="cpu")
    begin = 0 if strength is None else max(steps - int(steps * strength), 0) * scheduler.order
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(IMAGE.shape, generator=generator)
    if strength is None:
        latents = latents * scheduler.init_noise_sigma
    else:
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
        latents = scheduler.add_noise(IMAGE, latents, scheduler.timesteps[begin : begin + 1])
    more = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for timestep in scheduler.timesteps[begin:]:
        output = exact(scheduler, scheduler.scale_model_input(latents, timestep), timestep)
        latents = scheduler.step(output, timestep, latents, **more, return_dict=False)[0]
    return float((latents - IMAGE).pow(2).mean().sqrt())


@functools.cache
def _of_layers() -> Any:
    pipe = build("sd")
    for part in ("unet", "vae", "text_encoder"):
        setattr(pipe, part, torch.nn.Linear(1, 1))
    return pipe


def without_networks() -> Any:
    """Return tiny-sd's pipeline with a layer in the place of each network, for tests of the scheduler alone."""
    return copy.copy(_of_layers())


def with_sampler(name: str, pipe: Any = None, **config: Any) -> Any:
    """Return tiny-sd's pipeline, its scheduler with another configuration, with a sampler."""
    pipe = build("sd") if pipe is None else pipe
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **config)
    return pipe if name == "euler_a" else vivace.apply(pipe, f"scheduler({name})").pipe


@pytest.mark.parametrize("spacing", ["trailing", "leading"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("pndm-*", "lcm-trailing", "ddim-leading", "tcd-leading", "heun-trailing", "deis-trailing")
def test_every_number_of_steps_draws_or_is_refused_in_words(name: str, spacing: str) -> None:
    pipe = with_sampler(name, timestep_spacing=spacing, steps_offset=1)
    for steps in COUNTS:
        reason = refused_steps(pipe, {"num_inference_steps": steps})
        if reason is None:
            assert left(copy.deepcopy(pipe.scheduler), steps) < 0.2, steps
        else:
            assert type(pipe.scheduler).__name__ in reason
            assert str(steps) in reason
            assert name in ("pndm", "lcm", "tcd") or (steps, spacing) == (1000, "leading")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("scheduler(pndm)+steps(3)", "PNDMScheduler takes 4 to 1000 steps, got 3"),
        ("scheduler(lcm)+steps(60)", "LCMScheduler takes 1 to 50 steps of its 50 timesteps, got 60"),
        ("scheduler(tcd)+steps(1000)", "TCDScheduler takes 1 to 50 steps"),
    ],
)
def test_a_call_with_another_number_of_steps_is_an_error_of_usage(recipe: str, message: str) -> None:
    made = vivace.apply(build("sd"), recipe)
    with pytest.raises(UsageError, match=message):
        made("a red circle", height=64, width=64)


IN_THE_MIDDLE = [name for name in NAMES if name not in ("euler_a", "pndm", "lms")]


def from_pictures(kind: str = "Img2Img") -> Any:
    none: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    return as_pipeline(build("sd"), f"StableDiffusion{kind}Pipeline", **none)


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
@pytest.mark.quick("heun", "ddim")
def test_from_a_picture_no_noise_is_left(name: str) -> None:
    scheduler = vivace.apply(from_pictures(), f"scheduler({name})").pipe.scheduler
    for steps, strength in ((20, 0.3), (20, 0.6), (20, 0.9), (10, 0.2)):
        assert left(scheduler, steps, strength) < 0.1, (steps, strength)


@pytest.mark.parametrize("kind", ["Img2Img", "Inpaint"])
@pytest.mark.parametrize("name", ["lms", "pndm"])
def test_a_sampler_that_is_wrong_from_the_middle_is_refused_there(name: str, kind: str) -> None:
    with pytest.raises(
        Unsupported, match=r"(leaves noise|Runge-Kutta).*take scheduler\(euler\) or"
    ) as caught:
        vivace.apply(from_pictures(kind), f"scheduler({name})")
    assert f"scheduler({name})" not in str(caught.value)


# noise levels: of all samplers, on all kinds of models

BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
KINDS: dict[str, Any] = {
    "epsilon": EulerDiscreteScheduler(**BETAS),
    "v": EulerDiscreteScheduler(**BETAS, prediction_type="v_prediction"),
    "flow": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow, by size": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=5.0),
    "flow, on a solver": DPMSolverMultistepScheduler(
        use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", get_args(Scheduler.model_fields["sampler"].annotation))
def test_noise_levels_begin_where_the_models_do_and_end_without_noise(name: str, kind: str) -> None:
    pipe = without_networks()  # its call passes nothing to `set_timesteps`
    pipe.scheduler = before = copy.deepcopy(KINDS[kind])
    try:
        after = vivace.apply(pipe, f"scheduler({name})").pipe.scheduler
    except NoEffect:
        return
    except Unsupported as error:
        fits = {"epsilon", "v"} if "flow" not in name else {"flow", "flow, by size", "flow, on a solver"}
        in_words = ("not compatible", "torchsde", "last step does nothing", "not implemented")
        assert kind not in fits or name in ("dpmpp_sde", "edm_euler", "edm_dpmpp_2m"), error
        assert any(words in str(error) for words in in_words)
        return
    by_size = {"mu": 1.0} if kind == "flow, by size" and "shift" in str(before.config) else {}
    before.set_timesteps(10, **by_size)
    after.set_timesteps(10, **(by_size if name != "flow_heun" else {}))
    levels = getattr(after, "sigmas", None)
    if levels is None:  # of those that look their noise up by the timestep
        assert int(after.timesteps[-1]) < 110
        return
    assert float(levels[0]) == pytest.approx(float(before.sigmas[0]), rel=0.01)
    least = 0.03 if kind in ("epsilon", "v") else 0.0  # deis and sa_solver end at the model's least noise
    assert float(levels[-1]) <= least
    if kind.startswith("flow") and name != "flow_heun":
        # Halfway the shift is seen; solvers spread the unshifted levels a little differently.
        assert float(levels[5]) == pytest.approx(float(before.sigmas[5]), abs=0.06)


FLOW = ("dpmpp_2m", "dpmpp_2s", "unipc", "flow_euler", "flow_heun", "flow_lcm")


@pytest.mark.parametrize("first", FLOW)
@pytest.mark.parametrize("second", FLOW)
@pytest.mark.parametrize("is_set", [False, True])
def test_a_shift_survives_every_change_of_sampler(first: str, second: str, is_set: bool) -> None:
    """Also one that the user has set, which no configuration holds."""
    pipe = without_networks()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.5 if is_set else 6.0)
    if is_set:
        pipe.scheduler.set_shift(6.0)
    for name in (first, second):
        with contextlib.suppress(NoEffect):
            vivace.apply(pipe, f"scheduler({name})")
    pipe.scheduler.set_timesteps(10)
    levels = pipe.scheduler.sigmas.unique().flip(0)
    assert float(levels[5]) == pytest.approx(6 * 0.5 / (1 + 5 * 0.5), abs=0.06)


def test_a_shift_that_the_user_sets_is_kept_by_a_session() -> None:
    pipe = build("flux")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    made = vivace.apply(pipe, "steps(4)")
    made.pipe.scheduler.set_shift(6.0)
    draw(made, num_inference_steps=4)
    assert float(made.pipe.scheduler.sigmas[2]) == pytest.approx(6 * 0.5 / (1 + 5 * 0.5), abs=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("heun", "lms", "euler", "unipc", "deis")
def test_a_model_that_begins_at_pure_noise_gets_samplers_that_do(name: str) -> None:
    pipe = build("sd")
    config = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **config)
    if name in ("pndm", "lms", "heun", "dpm2", "dpm2_a", "dpmpp_2s", "deis", "sa_solver"):
        with pytest.raises(Unsupported, match=r"pure noise.*take scheduler\(euler\) or") as caught:
            vivace.apply(pipe, f"scheduler({name})")
        assert "scheduler(unipc)" in str(caught.value)
        assert "heun)" not in str(caught.value)
        return
    made = pipe if name == "euler_a" else vivace.apply(pipe, f"scheduler({name})").pipe
    made.scheduler.set_timesteps(4)
    first = int(made.scheduler.timesteps[0])
    assert first == 999
    assert float(made.scheduler.alphas_cumprod[first]) < 1e-6


@pytest.mark.parametrize("name", ["euler_a", "dpm2", "dpm2_a", "pndm"])
@pytest.mark.quick("dpm2", "pndm")
def test_predictions_that_a_sampler_does_not_know_are_refused(name: str) -> None:
    from diffusers import DDIMScheduler

    pipe = build("sd")
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, prediction_type="sample")
    with pytest.raises(Unsupported, match=r"predicts 'sample'.*scheduler\(euler\)") as caught:
        vivace.apply(pipe, f"scheduler({name})")
    assert f"scheduler({name})" not in str(caught.value)
    assert type(pipe.scheduler) is DDIMScheduler


def test_betas_that_a_sampler_does_not_know_are_refused() -> None:
    from diffusers import DDPMScheduler

    pipe = build("sd")
    pipe.scheduler = DDPMScheduler(beta_schedule="sigmoid")
    with pytest.raises(Unsupported, match="sigmoid is not implemented"):
        vivace.apply(pipe, "scheduler(euler)")


# copies of a session's scheduler


@pytest.mark.parametrize("how", ["deepcopy", "copy", "from_config"])
@pytest.mark.parametrize("recipe", ["baseline", "scheduler(dpmpp_2m)", "bf16"])
@pytest.mark.diagonal
@pytest.mark.quick("*copy")
def test_a_copy_on_another_pipeline_draws_what_it_should(how: str, recipe: str) -> None:
    made = vivace.load("tiny-sd", recipe)
    kind = type(made.pipe)
    call: dict[str, Any] = {"num_inference_steps": 4, "height": 64, "width": 64, "output_type": "np"}

    def drawn(session: Any, seed: int = 0, **more: Any) -> np.ndarray:
        arguments = call | more | {"generator": torch.Generator().manual_seed(seed)}
        return np.asarray(session("a red circle", **arguments).images)

    first = drawn(made)
    scheduler = made.pipe.scheduler
    copied = {
        "deepcopy": lambda: copy.deepcopy(scheduler),
        "copy": lambda: copy.copy(scheduler),
        "from_config": lambda: scheduler.from_config(scheduler.config),
    }[how]()
    other = kind(**made.pipe.components | {"scheduler": copied})
    other.set_progress_bar_config(disable=True)
    between: list[np.ndarray] = []

    def look(*_: Any) -> dict[str, Any]:
        if not between:
            between.append(drawn(made, 1, num_inference_steps=3))
        return {}

    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    alone = drawn(other, latents=latents)
    assert np.array_equal(drawn(other, latents=latents, callback_on_step_end=look), alone), (
        "one steps the other"
    )
    assert np.array_equal(drawn(made), first)
    assert len(between) == 1


def test_a_copy_without_generators_says_so() -> None:
    made = vivace.apply(build("flux"), "scheduler(flow_lcm)")
    copied = copy.deepcopy(made.pipe.scheduler)
    copied.set_timesteps(4, mu=1.0)
    with pytest.raises(Unsupported, match="FlowMatchLCMScheduler is a copy"):
        copied.step(torch.zeros(1, 4, 4), copied.timesteps[0], torch.zeros(1, 4, 4))
