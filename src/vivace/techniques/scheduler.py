"""Another sampler for the same denoiser.

Why: higher-order solvers need fewer steps for the same picture quality; by itself a first-order sampler is as fast
    per step as any other but Heun and DPM2, which call the denoiser twice.
Costs: another path from noise to picture, so another picture.
Needs: a scheduler of the family that the model was trained for (diffusers' own list of compatible ones).
Source: Karras et al., arXiv 2206.00364 (Euler, Heun); Lu et al., DPM-Solver++, arXiv 2211.01095; Zhao et al.,
    UniPC, arXiv 2302.04867; Song et al., DDIM, arXiv 2010.02502.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.spec.script import Script, literal, written_call
from vivace.spec.technique import Effect, Stage, Target, Technique, knob

_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_2s": ("DPMSolverSinglestepScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}),
}


class Scheduler(Technique):
    name: ClassVar[str] = "scheduler"
    summary: ClassVar[str] = "another sampler"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "scheduler"
    same_picture: ClassVar[bool] = False

    sampler: Literal[
        "euler",
        "euler_a",
        "ddim",
        "ddpm",
        "pndm",
        "heun",
        "dpm2",
        "dpm2_a",
        "dpmpp_2m",
        "dpmpp_2m_sde",
        "dpmpp_2s",
        "deis",
        "unipc",
        "lcm",
        "flow_euler",
        "flow_heun",
    ] = knob(tune=["euler", "dpmpp_2m", "unipc"], about="the sampler's name")
    karras: bool = knob(False, tune=[False, True], about="Karras' spacing of the noise levels")
    spacing: Literal["as_published", "leading", "trailing", "linspace"] = knob(
        "as_published", about="timestep spacing; few-step models want trailing"
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        import diffusers

        class_name = _CLASSES[self.sampler][0]
        current = target.pipe.scheduler
        # LCM's scheduler names none, though it has the noise and the configuration of Euler's family.
        relative = diffusers.EulerDiscreteScheduler if type(current).__name__ == "LCMScheduler" else current
        family = {c.__name__ for c in relative._get_compatibles()} | {type(current).__name__}
        if class_name not in family:
            return f"{class_name} does not belong to the family of this model's {type(current).__name__}"
        if self.karras and "use_karras_sigmas" not in _parameters(class_name):
            return f"{class_name} has no Karras spacing"
        if self.spacing != "as_published" and "timestep_spacing" not in _parameters(class_name):
            return f"{class_name} has a fixed timestep spacing"
        return None

    def apply(self, target: Target) -> Effect:
        import diffusers

        before = target.pipe.scheduler
        class_name, overrides = self._chosen(before)
        after = getattr(diffusers, class_name).from_config(before.config, **overrides)
        if type(after) is type(before) and all(before.config.get(k) == v for k, v in overrides.items()):
            raise NoEffect(f"{class_name} with these settings is the model's own scheduler", already_so=True)
        target.pipe.scheduler = after
        return Effect(changed={"scheduler_before": type(before).__name__, "scheduler": class_name})

    def script(self, target: Target) -> Script:
        class_name, overrides = self._chosen(target.pipe.scheduler)
        given = {name: literal(value) for name, value in overrides.items()}
        made = written_call(f"pipe.scheduler = {class_name}.from_config", "pipe.scheduler.config", **given)
        lines = made.splitlines()
        if overrides.get("clip_sample") is False:
            lines.insert(
                0, "# Without clip_sample=False it would clip latents to -1..1, as if they were pixels."
            )
        return Script(imports=(f"diffusers:{class_name}",), lines=tuple(lines))

    def _chosen(self, before: Any) -> tuple[str, dict[str, Any]]:
        """The class, and in what it differs from the configuration of the scheduler that is there."""
        class_name, overrides = _CLASSES[self.sampler]
        overrides = dict(overrides)
        if self.karras:
            overrides["use_karras_sigmas"] = True
        if self.spacing != "as_published":
            overrides["timestep_spacing"] = self.spacing
        # DDIM, DDPM and LCM clip the predicted picture to -1..1 unless told otherwise. Pixels fit in there, latents
        # do not, and a scheduler whose class knows no clipping has no say in its configuration.
        if "clip_sample" in _parameters(class_name) and "clip_sample" not in before.config:
            overrides["clip_sample"] = False
        return class_name, overrides


def _parameters(class_name: str) -> set[str]:
    import inspect

    import diffusers

    return set(inspect.signature(getattr(diffusers, class_name).__init__).parameters)
