"""The images of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from vivace.foundation.spec.settings import Batch, CallSettings, Option, Prompts, SourceSettings, TaskName
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.task_names import TextMode
from vivace.models.controlnet import RANDOM


class ImageRequest(SourceSettings, CallSettings):
    """The images of a search. Fields that are None take the model's own values.

    Attributes:
        prompts: instead of the model's set of thirteen.
        batch: images per call.
        text: "prompts", or "repeated" if all timed calls have the same.
        task, images, masks, controls, strength, controlnet: the source images, as in `WorkloadRequest`.
    """

    prompts: Prompts = None
    batch: Annotated[Batch, Option("Images per call; default: as the goal says.", default="")] = 1
    text: TextMode = "prompts"
    task: TaskName = None

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
        return self.part(
            WorkloadRequest,
            prompts=tuple(prompts),
            seed=seed,
            num_seeds=seeds,
            num_inference_steps=steps or self.num_inference_steps,
            batches=(self.batch,),
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
