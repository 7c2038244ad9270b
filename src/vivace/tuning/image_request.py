"""The images of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.workload import Task, TextMode
from vivace.models.controlnet import RANDOM


@dataclass(frozen=True)
class ImageRequest:
    """The images of a search. Fields that are None take the model's own values.

    Attributes:
        prompts: instead of the model's set of thirteen.
        batch: images per call.
        text: "prompts", or "repeated" if all timed calls have the same.
        task, images, masks, controls, strength, controlnet: the source images, as in `WorkloadRequest`.
    """

    prompts: tuple[str, ...] | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    batch: int = 1
    text: TextMode = "prompts"
    task: Task | None = None
    images: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    strength: float | None = None
    controlnet: str | None = None

    def of(
        self, prompts: Sequence[str], steps: int | None = None, seeds: int = 1, seed: int = 0
    ) -> WorkloadRequest:
        """Return the workload of the first prompts, each with its own image if there is one for each.

        Args:
            seeds: of each prompt; `seed` is the first.
        """
        files = {
            name: paths if len(paths) == 1 else paths[: len(prompts)]
            for name in ("images", "masks", "controls")
            if (paths := getattr(self, name))
        }
        return WorkloadRequest(
            prompts=tuple(prompts),
            seed=seed,
            num_seeds=seeds,
            height=self.height,
            width=self.width,
            num_inference_steps=steps or self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            batches=(self.batch,),
            text=self.text,
            task=self.task,
            strength=self.strength,
            controlnet=self.controlnet,
            **files,
        )

    @property
    def has_random_controlnet(self) -> bool:
        """Whether images follow a ControlNet with random weights, so that they show nothing."""
        is_control = self.task == "control" or (self.task is None and bool(self.controls))
        return is_control and self.controlnet in (None, RANDOM)

    @property
    def options(self) -> tuple[tuple[str, str | int | float], ...]:
        """Return values that are not the model's own, as options of `vivace generate`: name and value."""
        names = ("num_inference_steps", "guidance_scale", "height", "width", "strength", "controlnet")
        values = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        files = [
            (name[:-1], paths[0])
            for name in ("images", "masks", "controls")
            if (paths := getattr(self, name))
        ]
        return (*values, *files)
