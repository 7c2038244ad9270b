"""Use another sampler (scheduler) with the same denoiser.

Why: higher-order solvers need fewer steps for the same image quality. Per step all samplers take the same time, except
    Heun, DPM2 and DPM++ SDE, which call the denoiser twice.
Costs: another path from noise to image, so another image. LCM and TCD are for models distilled for them; with other
    models images are blurred or flat.
Needs: a scheduler of the model's family. For Stable Diffusion these are diffusers' compatible schedulers, LCM and TCD,
    which share its noise and configuration. Flow models (FLUX) have their own schedulers, and solvers with flow sigmas;
    models with EDM noise (Playground v2.5) have two. lms needs the package scipy, dpmpp_sde torchsde.
Source: Karras et al., arXiv 2206.00364 (Euler, Heun); Lu et al., DPM-Solver++, arXiv 2211.01095; Zhao et al.,
    UniPC, arXiv 2302.04867; Song et al., DDIM, arXiv 2010.02502; Xue et al., SA-Solver, arXiv 2305.16267; Zheng et al.,
    Trajectory Consistency Distillation, arXiv 2402.19159.

These diffusers schedulers are left out: IPNDM, whose noise levels are not the model's; the cosine DPM++ of Stable
Audio; score-based and consistency-model samplers, for denoisers with other outputs; parallel DDIM and DDPM, which give
the same images as the plain ones; inverse schedulers, which go from images to noise; and those of a single other model
(SCM, UnCLIP, ...).

A sampler that adds noise takes it from the generators of the call. FLUX's pipeline passes none to its scheduler, and
dpmpp_sde accepts none, so vivace passes it to them.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.machinery.samplers import give_generators, refused_by_model, takes_zero_snr
from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts, knob
from vivace.machinery.technique.pipeline_code import (
    asks_the_scheduler_for_flow_sigmas,
    passed_to_set_timesteps,
    passes_a_shift_to_dynamic_schedulers,
    passes_sigmas_as_an_array,
)
from vivace.machinery.technique.script import Script, literal, written_call

_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_2s": ("DPMSolverSinglestepScheduler", {"lower_order_final": True}),
    "dpmpp_sde": ("DPMSolverSDEScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "sa_solver": ("SASolverScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "edm_euler": ("EDMEulerScheduler", {}),
    "edm_dpmpp_2m": ("EDMDPMSolverMultistepScheduler", {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow_lcm": ("FlowMatchLCMScheduler", {}),
}
_PACKAGES = {"lms": "scipy", "dpmpp_sde": "torchsde"}
"""Packages without which diffusers has only a dummy class."""
_EDM = frozenset({"EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"})
_FLOW = frozenset(
    {"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"}
)
# They share Euler's noise and configuration, but do not list all (or any) compatible schedulers.
_WITH_EULER = frozenset({"LCMScheduler", "TCDScheduler", "SASolverScheduler"})
_PROBED_STEPS = 20
_OF_THE_PIPELINE = ("dpmpp_sde", "dpmpp_2m_sde", "flow_lcm")
"""Samplers that get their noise from one pipeline's call."""


class Scheduler(Technique):
    name: ClassVar[str] = "scheduler"
    summary: ClassVar[str] = "another sampler"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="scheduler",
        same_picture=False,
    )

    # fmt: off
    sampler: Literal[
        "euler", "euler_a", "ddim", "ddpm", "pndm", "lms", "heun", "dpm2", "dpm2_a", "dpmpp_2m", "dpmpp_2m_sde",
        "dpmpp_2s", "dpmpp_sde", "deis", "unipc", "sa_solver", "lcm", "tcd", "edm_euler", "edm_dpmpp_2m",
        "flow_euler", "flow_heun", "flow_lcm",
    ] = knob(tune=["euler", "dpmpp_2m", "unipc"], about="the sampler's name")
    # fmt: on
    karras: bool = knob(False, tune=[False, True], about="Karras spacing of the noise levels")
    spacing: Literal["as_published", "leading", "trailing", "linspace"] = knob(
        "as_published", about="timestep spacing; few-step models need trailing"
    )

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            belongs_to_pipeline=self.sampler in _OF_THE_PIPELINE,
        )

    def unsupported(self, target: Target) -> str | None:
        class_name = _CLASSES[self.sampler][0]
        package = _PACKAGES.get(self.sampler)
        if package is not None and not target.machine.has_package(package):
            return f"{class_name} needs the package {package}, which is not installed (pip install {package})"
        if self.karras and "use_karras_sigmas" not in _parameters(class_name):
            return f"{class_name} has no Karras spacing"
        if self.spacing != "as_published" and "timestep_spacing" not in _parameters(class_name):
            return f"{class_name} has a fixed timestep spacing"
        if target.pipe is None:
            return None
        reason = self._unsupported_by(target.pipe)
        if reason is None:
            return self._ignored(target.pipe)
        others = [
            name
            for name in _others(target.pipe)
            if Scheduler(sampler=name)._unsupported_by(target.pipe) is None
        ]
        return (
            f"{reason}; take {' or '.join(f'scheduler({name})' for name in others) or 'the sampler it has'}"
        )

    def _unsupported_by(self, pipe: Any) -> str | None:
        """Return why the sampler does not fit a pipeline and its model, or None."""
        class_name, current = _CLASSES[self.sampler][0], pipe.scheduler
        if class_name not in _family(current):
            return f"{class_name} is not compatible with this model's {type(current).__name__}"
        return (
            self._unsupported_for_the_model(pipe)
            or self._unsupported_in_pipeline(pipe)
            or self._unsupported_in_the_middle(pipe)
        )

    def _unsupported_for_the_model(self, pipe: Any) -> str | None:
        """Return the model's training that the sampler does not take, or None."""
        current = pipe.scheduler
        class_name, overrides = self._chosen(pipe)
        if current.config.get("rescale_betas_zero_snr") and not takes_zero_snr(_class(class_name)):
            return (
                f"this model is trained to begin at pure noise (rescale_betas_zero_snr), and {class_name} begins "
                "below it and would draw washed-out images"
            )
        reason = _refused(class_name, _merged(current.config, overrides))
        if reason is None:
            return None
        own = "flow_prediction" if _is_flow(current) else "epsilon"
        predicts = current.config.get("prediction_type", own)
        return f"{class_name} does not take this model (it predicts '{predicts}'): {reason}"

    def _unsupported_in_the_middle(self, pipe: Any) -> str | None:
        """Return why the sampler cannot begin in the middle of its schedule, as image-to-image does, or None."""
        if not hasattr(type(pipe), "get_timesteps"):
            return None
        class_name, overrides = self._chosen(pipe)
        if class_name == "PNDMScheduler" and not _merged(pipe.scheduler.config, overrides).get(
            "skip_prk_steps"
        ):
            return (
                "PNDMScheduler's first steps are Runge-Kutta's, of four calls each, and image-to-image begins amid "
                "them; a model whose scheduler says skip_prk_steps has none"
            )
        if class_name == "LMSDiscreteScheduler":
            return (
                "LMSDiscreteScheduler leaves noise where it begins in the middle of its schedule, as image-to-image "
                "does: each step continues the slopes of up to four"
            )
        if _is_flow(pipe.scheduler) and not hasattr(_class(class_name), "scale_noise"):
            return f"{type(pipe).__name__} adds noise to an image by scale_noise, which {class_name} lacks"
        return None

    def _unsupported_in_pipeline(self, pipe: Any) -> str | None:
        """Return the argument of a flow model's pipeline that this scheduler does not support, or None."""
        class_name = _CLASSES[self.sampler][0]
        name, own, config = type(pipe).__name__, type(pipe.scheduler).__name__, pipe.scheduler.config
        if not _is_flow(pipe.scheduler):
            return None
        accepted = inspect.signature(_class(class_name).set_timesteps).parameters
        passed = passed_to_set_timesteps(pipe)
        if self._has_flow_sigmas(pipe.scheduler):
            if self.karras or self.spacing != "as_published":
                return f"{class_name} supports only the model's own spacing for flow models"
            if config.get("shift_terminal") or config.get("time_shift_type", "exponential") != "exponential":
                return f"{class_name} cannot shift its noise levels as this model's {own} does"
            passed -= {"sigmas"} if asks_the_scheduler_for_flow_sigmas(pipe) else set()
            if "sigmas" in passed and not passes_sigmas_as_an_array(pipe):
                return f"{name} passes its noise levels as a list, which {class_name} does not take"
        if _constant_shift(pipe.scheduler) is None:
            passed |= {"mu"} if passes_a_shift_to_dynamic_schedulers(pipe) else set()
        missing = sorted(passed - set(accepted))
        if missing:
            return (
                f"{name} passes {' and '.join(missing)} to its scheduler, which {class_name} does not accept"
            )
        return None

    def _ignored(self, pipe: Any) -> str | None:
        """Return the setting that diffusers would accept but ignore, or None."""
        class_name, overrides = self._chosen(pipe)
        for setting, knob_name, other in (
            ("use_karras_sigmas", "karras", False),
            ("timestep_spacing", "spacing", None),
        ):
            if setting not in overrides:
                continue
            others = [other] if other is not None else ["leading", "trailing", "linspace"]
            levels = _levels(class_name, pipe.scheduler, overrides)
            if all(
                _levels(class_name, pipe.scheduler, overrides | {setting: value}) == levels
                for value in others
            ):
                condition = " with karras=True" if knob_name == "spacing" and self.karras else ""
                return f"{class_name}{condition} ignores {knob_name}: its noise levels do not depend on it"
        return None

    def apply(self, target: Target) -> Effect:
        before = target.pipe.scheduler
        class_name, overrides = self._chosen(target.pipe)
        after = _class(class_name).from_config(_merged(before.config, overrides))
        if class_name == type(before).__name__ and all(
            before.config.get(k) == v for k, v in overrides.items()
        ):
            raise NoEffect(
                f"{class_name} with these settings is already the model's scheduler", already_so=True
            )
        if hasattr(before, "set_shift") and hasattr(after, "set_shift"):
            after.set_shift(before.shift)  # which a user may have set; the configuration does not say so
        target.pipe.scheduler = after
        if self._needs_noise(before):
            give_generators(target.pipe)
        return Effect(changed={"scheduler_before": type(before).__name__, "scheduler": class_name})

    def script(self, target: Target) -> Script | None:
        if self._needs_noise(target.pipe.scheduler):
            return None
        class_name, overrides = self._chosen(target.pipe)
        named = {name: value for name, value in overrides.items() if name in _parameters(class_name)}
        others = {name: value for name, value in overrides.items() if name not in named}
        config = "pipe.scheduler.config"
        if others:
            inside = ", ".join(f"{literal(name)}: {literal(value)}" for name, value in others.items())
            config = f"{{**{config}, {inside}}}"
        arguments = {name: literal(value) for name, value in named.items()}
        made = written_call(f"pipe.scheduler = {class_name}.from_config", config, **arguments)
        lines = made.splitlines()
        if overrides.get("clip_sample") is False:
            lines.insert(
                0, "# Without clip_sample=False it would clip latents to -1..1, as if they were pixels."
            )
        if others:
            lines.insert(
                0, "# The model's shift of noise levels is fixed; equal bounds make the pipeline keep it."
            )
        return Script(imports=(f"diffusers:{class_name}",), lines=tuple(lines))

    def _chosen(self, pipe: Any) -> tuple[str, dict[str, Any]]:
        """Return the class, and its differences from the current scheduler's configuration."""
        before = pipe.scheduler
        class_name, overrides = _CLASSES[self.sampler]
        overrides = dict(overrides)
        if self.karras:
            overrides["use_karras_sigmas"] = True
        if self.spacing != "as_published":
            overrides["timestep_spacing"] = self.spacing
        # DDIM, DDPM, LCM and TCD clip the predicted image to -1..1 by default. That suits pixels but not latents, and
        # the configuration of a scheduler without clipping does not turn it off.
        if "clip_sample" in _parameters(class_name) and "clip_sample" not in before.config:
            overrides["clip_sample"] = False
        if self._has_flow_sigmas(before):
            overrides |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        if _is_flow(before):
            overrides |= self._shifting(pipe)
        return class_name, overrides

    def _shifting(self, pipe: Any) -> dict[str, Any]:
        """Return the settings that keep a flow model's constant shift of noise levels.

        Solvers call it flow_shift; flow matching's own schedulers, shift. One that grows with the size of the image
        has the same settings everywhere.
        """
        before = pipe.scheduler
        shift = _constant_shift(before)
        if shift is None or _CLASSES[self.sampler][0] == type(before).__name__:
            return {}
        name = "flow_shift" if self._has_flow_sigmas(before) else "shift"
        if name == "shift" or "mu" not in passed_to_set_timesteps(pipe):
            return {name: shift} | dict.fromkeys(before.config.keys() & {"use_dynamic_shifting"}, False)
        # Pipelines that pass a shift for their image size pass it to all solvers, which accept it only with dynamic
        # shifting. With equal bounds it is the model's own shift at any size.
        bound = math.log(shift)
        return {name: shift, "use_dynamic_shifting": True, "base_shift": bound, "max_shift": bound}

    def _has_flow_sigmas(self, before: Any) -> bool:
        return _is_flow(before) and _CLASSES[self.sampler][0] not in _FLOW

    def _needs_noise(self, before: Any) -> bool:
        """Return whether the pipeline does not pass it the generators of the call."""
        return self.sampler == "dpmpp_sde" or (
            _is_flow(before) and self.sampler in {"flow_lcm", "dpmpp_2m_sde"}
        )


def _family(current: Any) -> set[str]:
    """Return the names of the schedulers that can replace this one."""
    import diffusers

    name = type(current).__name__
    if name in _EDM:
        return set(_EDM)
    if _is_flow(current):
        solvers = {c for c, _ in _CLASSES.values() if "use_flow_sigmas" in _parameters(c)}
        return {*_FLOW, *solvers}
    relative = diffusers.EulerDiscreteScheduler if name in _WITH_EULER else current
    family = {c.__name__ for c in relative._get_compatibles()} | {name}
    return (family - _EDM) | (_WITH_EULER if "EulerDiscreteScheduler" in family else set())


def _others(pipe: Any) -> list[str]:
    """Return the samplers that are not the pipeline's own and can be made here."""
    own = type(pipe.scheduler).__name__
    return [
        name
        for name, (class_name, _) in _CLASSES.items()
        if class_name != own and (name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name]))
    ]


def _refused(class_name: str, config: dict[str, Any]) -> str | None:
    """Return why diffusers makes no scheduler of a configuration, or none that reads its predictions, or None."""
    try:
        made = _class(class_name).from_config(config)
    except (ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())
    return refused_by_model(made)


def _constant_shift(scheduler: Any) -> float | None:
    """Return a flow scheduler's shift of noise levels; None where it depends on the size of the image."""
    config, is_solver = scheduler.config, type(scheduler).__name__ not in _FLOW
    if config.get("use_dynamic_shifting"):
        is_equal = is_solver and config.get("base_shift") == config.get("max_shift")
        return math.exp(config["base_shift"]) if is_equal else None
    if is_solver:
        return float(config.get("flow_shift", 1.0))
    return float(scheduler.shift if hasattr(type(scheduler), "shift") else config.get("shift", 1.0))


def _is_flow(scheduler: Any) -> bool:
    return type(scheduler).__name__ in _FLOW or bool(scheduler.config.get("use_flow_sigmas"))


def _levels(class_name: str, current: Any, overrides: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the timesteps and noise levels of a scheduler."""
    made = _class(class_name).from_config(_merged(current.config, overrides))
    accepted = inspect.signature(made.set_timesteps).parameters
    shifts = "mu" in accepted and made.config.get("use_dynamic_shifting")
    made.set_timesteps(_PROBED_STEPS, **({"mu": 1.0} if shifts else {}))
    sigmas = getattr(made, "sigmas", None)
    return made.timesteps.tolist(), [] if sigmas is None else [float(sigma) for sigma in sigmas]


def _merged(config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge configurations, keeping settings that the class does not know but the pipeline reads.

    diffusers notes which settings were not given, and sets these to the class's defaults again.
    """
    not_given = [name for name in config.get("_use_default_values", ()) if name not in overrides]
    return {**config, **overrides, "_use_default_values": not_given}


def _class(class_name: str) -> Any:
    import diffusers

    return getattr(diffusers, class_name)


def _parameters(class_name: str) -> set[str]:
    return set(inspect.signature(_class(class_name).__init__).parameters)
