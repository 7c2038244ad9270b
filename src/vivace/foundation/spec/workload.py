"""A workload: prompts x seeds, size, steps, guidance, batch, and the images that it starts from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from vivace.foundation.spec.base import SparseSpec, Spec
from vivace.foundation.spec.task_names import TASKS as TASKS
from vivace.foundation.spec.task_names import Task as Task
from vivace.foundation.spec.task_names import TextMode as TextMode

STRENGTHS: dict[Task, float] = {"image": 0.8, "inpaint": 0.9}
"""The default strength of the tasks that have one."""

MAX_PIXEL_STEPS = 10**11
"""Limit on pixels x images x denoising steps of one workload. It catches typing mistakes (--height 100000).

1,000 images of FLUX at 1024x1024 and 50 steps are half of it.
"""
MAX_SIDE = 1_000_000
"""Limit of height and width, far above that of any model; `vivace.benchmark.comparison` names the model's own."""
MAX_PROMPT_LENGTH = 20_000
"""Most characters of a prompt. Text encoders read some hundred words."""


class Source(Spec):
    """The source images of one image, in the workload's size, by the sha256 of their pixels.

    Attributes:
        image: the image to change; None for `control`.
        mask: white where it is repainted; only for `inpaint`.
        control: the image that a ControlNet follows; only for `control`.
    """

    image: str | None = None
    mask: str | None = None
    control: str | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of its images."""
        return tuple(sha for sha in (self.image, self.mask, self.control) if sha is not None)


class Workload(SparseSpec):
    """The images to generate, the same for all recipes of a comparison.

    Attributes:
        task: what it starts from: "text" alone, an "image" to change by `strength`, an image to "inpaint" inside of a
            mask, an image that a ControlNet follows ("control"), or an image that the prompt tells how to "edit".
        strength: how much of an image is noise at the start, 0 to 1: that share of the steps is run.
        sources: one for all prompts, or one for each prompt.
        controlnet: of the task "control": FOLDER@FINGERPRINT of the ControlNet's weights, or "random".
        seeds: each prompt is generated at each seed, with a separate generator for each image.
        height, width: pixels.
        num_inference_steps, guidance_scale: the baseline's; a recipe may change them.
        batch: images per call. If the last call has too few images, it is filled up with the first ones, so that every
            call has the same shape.
        text: "prompts" runs the text encoders inside the timed call, on prompts that count as new in every call;
            "repeated" as well, on the first call's prompts in all calls; "embeddings" encodes the prompts before them.
    """

    omits = ("task", "strength", "sources", "controlnet")

    prompts: tuple[Annotated[str, Field(max_length=MAX_PROMPT_LENGTH)], ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    height: int = Field(gt=0, le=MAX_SIDE)
    width: int = Field(gt=0, le=MAX_SIDE)
    num_inference_steps: int = Field(ge=1, le=1000)
    guidance_scale: float = Field(ge=0, le=100)
    batch: int = Field(default=1, ge=1, le=4096)
    text: TextMode = "prompts"
    task: Task = "text"
    strength: float | None = Field(default=None, gt=0, le=1)
    sources: tuple[Source, ...] = ()
    controlnet: str | None = None

    @model_validator(mode="after")
    def _has_sources(self) -> Workload:
        if (self.task == "text") == bool(self.sources):
            raise ValueError(f"{self.task} has {len(self.sources)} images to start from")
        if self.sources and len(self.sources) not in (1, len(self.prompts)):
            raise ValueError(
                f"{len(self.sources)} images for {len(self.prompts)} prompts: give one, or one for each prompt"
            )
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_fit_a_generator(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if not 0 <= seed < 2**63:
                raise ValueError(f"seed {seed} is outside 0 .. 2**63 - 1")
        return seeds

    @property
    def call(self) -> dict[str, Any]:
        """The defaults of the pipeline's call: size, steps, guidance and, if there is one, strength."""
        names = ("height", "width", "num_inference_steps", "guidance_scale", "strength")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def num_images(self) -> int:
        """The number of images: prompts x seeds."""
        return len(self.prompts) * len(self.seeds)

    @property
    def pixel_steps(self) -> int:
        """Pixels x images x denoising steps."""
        return self.height * self.width * self.num_inference_steps * self.num_images

    def images(self) -> Iterator[tuple[int, str, int]]:
        """Yield (index, prompt, seed) in order: every prompt at the first seed, then at the second, ... So a
        measurement that stops early has used as many prompts as possible."""
        index = 0
        for seed in self.seeds:
            for prompt in self.prompts:
                yield index, prompt, seed
                index += 1

    @property
    def task_in_words(self) -> str:
        """The task in words, e.g. "inpaint, strength 0.9"."""
        return self.task + (f", strength {self.strength:g}" if self.strength is not None else "")

    def source_of(self, index: int) -> Source | None:
        """Return the source images of an image by its index; None for text."""
        return self.sources[index % len(self.prompts) % len(self.sources)] if self.sources else None

    def steps_that_run(self, run: int) -> int:
        """Return the `num_inference_steps` at which at least some number of steps run at this strength."""
        return run if self.strength is None else steps_for(run, self.strength)

    def calls(self) -> list[list[tuple[int, str, int]]]:
        """Return the images in order, `batch` per call, the last call filled up with the first images."""
        images = list(self.images())
        return [
            [images[(start + k) % len(images)] for k in range(self.batch)]
            for start in range(0, len(images), self.batch)
        ]


def steps_run(num_inference_steps: int, strength: float | None, *, rounds_up: bool) -> int:
    """Return how many steps are executed: the share `strength` of them, as diffusers rounds it."""
    if strength is None:
        return num_inference_steps
    share = min(num_inference_steps * strength, num_inference_steps)
    return num_inference_steps - int(num_inference_steps - share) if rounds_up else int(share)


def steps_for(run: int, strength: float) -> int:
    """Return the smallest `num_inference_steps` at which at least `run` steps are executed at this strength."""
    steps = max(run, math.floor(run / strength))
    while steps_run(steps, strength, rounds_up=False) < run:
        steps += 1
    return steps
