"""Samplers in each other's place."""

from typing import Any, get_args

import numpy as np
import pytest
import torch

import vivace
from tests.families import build, draw, drawn, psnr, session
from tests.targets import target_of
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.technique import Machine
from vivace.measure.image_metrics import faults
from vivace.models import find_model, load_pipeline
from vivace.techniques.scheduler import Scheduler

SD = ("ddim", "ddpm", "pndm", "lms", "heun", "dpm2", "dpm2_a", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_2s", "dpmpp_sde",
      "deis", "unipc", "sa_solver", "lcm", "tcd", "euler")  # fmt: skip
FLUX = ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_2s", "unipc", "flow_lcm")
A, B = "a red circle above a blue square", "a small yellow star left of a purple diamond"
CALL: dict[str, dict[str, Any]] = {
    "sd": {"num_inference_steps": 20, "height": 128, "width": 128, "guidance_scale": 4.0},
    "flux": {"num_inference_steps": 20, "guidance_scale": 3.5},
}


@pytest.mark.parametrize(
    ("family", "sampler"), [*(("sd", name) for name in SD), *(("flux", name) for name in FLUX)]
)
@pytest.mark.quick("sd-dpmpp_2m", "flux-flow_lcm")
@pytest.mark.long
@pytest.mark.exhaustive(
    "sd-d[!p]*", "sd-dpm2*", "sd-dpmpp_2m_sde", "sd-dpmpp_2s", "sd-[!d]*", "flux-d*", "flux-unipc"
)
def test_it_draws_what_the_prompt_says_and_the_seed_alone_decides(family: str, sampler: str) -> None:
    if sampler == "dpmpp_sde":
        pytest.importorskip("torchsde")
    made, call = session(family, f"scheduler({sampler})"), CALL[family]
    first = draw(made, A, **call)
    assert faults((first[0] * 255).round().astype(np.uint8)) == []
    torch.manual_seed(12)  # of no concern
    both = draw(made, [A, B], **call)
    assert psnr(both[0], first[0]) > 60, "of a batch each image is what it is alone"
    other = draw(made, B, seed=1, **call)
    assert psnr(both[1], other[0]) > 60
    again = draw(made, A, seed=1, **call)
    assert psnr(again, first) < 60
    assert psnr(again, other) < 18, "the prompt decides"


def test_every_sampler_is_drawn_above_or_refused_by_the_embedded_models() -> None:
    names = set(get_args(Scheduler.model_fields["sampler"].annotation))
    for family, samplers in (("sd", SD), ("flux", FLUX)):
        own = {"sd": "euler_a", "flux": "flow_euler"}[family]
        pipe = build(family)  # which a refusal leaves as it was
        for sampler in sorted(names - set(samplers)):
            with pytest.raises(NoEffect if sampler == own else Unsupported):
                vivace.apply(pipe, f"scheduler({sampler})")


@pytest.mark.parametrize("dynamic", [False, True])
def test_noise_levels_are_shifted_as_the_models_own(dynamic: bool) -> None:
    """As FLUX.1 [dev]'s, by the image's size, and as schnell's, always alike."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = build("flux")
    config = pipe.scheduler.config
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        config, **({"use_dynamic_shifting": True} if dynamic else {"shift": 3.0})
    )
    draw(vivace.apply(pipe), A, num_inference_steps=8)
    expected = pipe.scheduler.sigmas.tolist()
    draw(vivace.apply(pipe, "scheduler(dpmpp_2m)"), A, num_inference_steps=8)
    assert type(pipe.scheduler).__name__ == "DPMSolverMultistepScheduler"
    # The solver's unshifted levels begin at 0.999 and are spread from there.
    assert pipe.scheduler.sigmas.tolist() == pytest.approx(expected, abs=0.004)


@pytest.mark.parametrize(
    ("family", "recipe", "reason"),
    [
        ("sd", "scheduler(lcm, spacing=trailing)", "LCMScheduler ignores spacing"),
        ("sd", "scheduler(dpmpp_2m, spacing=leading, karras=True)", "with karras=True ignores spacing"),
        ("sd", "scheduler(ddim, karras=True)", "DDIMScheduler has no Karras spacing"),
        ("sd", "scheduler(dpmpp_2s, spacing=trailing)", "has a fixed timestep spacing"),
        ("sd", "scheduler(edm_euler)", "EDMEulerScheduler is not compatible with"),
        (
            "flux",
            "scheduler(flow_heun)",
            "FluxPipeline passes mu and sigmas to its scheduler, which FlowMatchHeun",
        ),
        ("flux", "scheduler(sa_solver)", r"last step does nothing.*take scheduler\(dpmpp_2m\)"),
        ("flux", "scheduler(unipc, karras=True)", "only the model's own spacing for flow models"),
        ("flux", "scheduler(dpmpp_2m, spacing=trailing)", "only the model's own spacing for flow models"),
        ("flux", "scheduler(euler_a)", "is not compatible with"),
    ],
)
def test_what_diffusers_would_ignore_or_break_on_is_refused(family: str, recipe: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        session(family, recipe)


@pytest.mark.parametrize(
    "recipe", ["scheduler(euler, karras=True, spacing=leading)", "scheduler(ddim, spacing=leading)"]
)
@pytest.mark.quick("*karras*")
def test_what_is_not_ignored_is_taken(recipe: str) -> None:
    plain = draw(session("sd", recipe.split(",")[0] + ")"))
    assert not np.array_equal(drawn("sd", recipe), plain)


@pytest.mark.parametrize(("sampler", "package"), [("lms", "scipy"), ("dpmpp_sde", "torchsde")])
def test_a_missing_package_is_named(sampler: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("cpu", "CPU", None, None)
    scheduler = Scheduler(sampler=sampler)
    has = Machine("cpu", "CPU", None, None, has_all_packages=True)
    assert scheduler.unsupported(target_of(has)) is None
    monkeypatch.setattr(Machine, "has_package", lambda _, name: name != package)
    assert f"pip install {package}" in (scheduler.unsupported(target_of(machine, build("sd"))) or "")


def test_edms_noise_has_its_own_samplers() -> None:
    from diffusers import EDMDPMSolverMultistepScheduler

    pipe = build("sdxl")
    pipe.scheduler = EDMDPMSolverMultistepScheduler(sigma_data=0.5, sigma_max=80.0, sigma_min=0.002)
    arguments = {"guidance_scale": 3.0, "num_inference_steps": 4}
    before = draw(vivace.apply(pipe), A, **arguments)
    made = vivace.apply(pipe, "scheduler(edm_euler)")
    assert pipe.scheduler.config.sigma_max == 80.0
    after = draw(made, A, **arguments)
    assert np.isfinite(after).all()
    assert not np.array_equal(after, before)
    with pytest.raises(NoEffect, match="with these settings is already"):
        vivace.apply(pipe, "scheduler(edm_euler)")
    with pytest.raises(Unsupported, match="EulerDiscreteScheduler is not compatible with"):
        vivace.apply(pipe, "scheduler(euler)")


@pytest.mark.parametrize(
    ("model", "sampler"),
    [("tiny-flux", "flow_lcm"), ("tiny-flux", "dpmpp_2m_sde"), ("tiny-sd", "dpmpp_sde")],
)
@pytest.mark.quick("*flow_lcm*", "*dpmpp_sde*")
def test_noise_is_the_same_in_every_precision(model: str, sampler: str) -> None:
    if sampler == "dpmpp_sde":
        pytest.importorskip("torchsde")

    def drawn(extra: str) -> np.ndarray:
        made = vivace.load(model, f"{extra}scheduler({sampler})+steps(8)")
        return np.asarray(made(A, generator=torch.Generator().manual_seed(0), output_type="np").images)

    assert psnr(drawn(""), drawn("bf16+")) > 20


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "lcm", "tcd"])
def test_latents_are_not_clipped(sampler: str) -> None:
    session = vivace.load("tiny-sd", f"scheduler({sampler})")
    assert session.pipe.scheduler.config.clip_sample is False, "it is true by default, for pixels"


def test_a_model_that_says_so_keeps_its_clipping() -> None:
    from diffusers import DDIMScheduler

    pipe = load_pipeline(find_model("tiny-sd"), "cpu")
    pipe.scheduler = DDIMScheduler(clip_sample=True)
    session = vivace.apply(pipe, "scheduler(ddpm)")
    assert session.pipe.scheduler.config.clip_sample is True
