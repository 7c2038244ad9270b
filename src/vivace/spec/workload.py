"""A workload: prompts x seeds, size, steps, guidance, batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vivace.spec.base import Spec

MAX_PIXEL_STEPS = 10**11
"""Limit on pixels x images x denoising steps of one workload. It catches typing mistakes (--height 100000).

1,000 images of FLUX at 1024x1024 and 50 steps are half of it.
"""
MAX_SIDE = 1_000_000
"""Limit of height and width that no model comes near; `vivace.benchmark.comparison` names the model's own."""
MAX_PROMPT_LENGTH = 20_000
"""Characters of a prompt. Text encoders read some hundred words."""


class Workload(Spec):
    """What is generated. It is the same for all recipes of a comparison.

    Attributes:
        seeds: each prompt is generated at each seed, with a separate generator for each image.
        height, width: pixels.
        num_inference_steps, guidance_scale: the baseline's; a recipe may change them.
        batch: images per call. If the last call has too few images, it is filled up with the first ones, so that every
            call has the same shape.
        text: "prompts" runs the text encoders inside the timed call; "embeddings" encodes the prompts before it.
    """

    prompts: tuple[Annotated[str, Field(max_length=MAX_PROMPT_LENGTH)], ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    height: int = Field(gt=0, le=MAX_SIDE)
    width: int = Field(gt=0, le=MAX_SIDE)
    num_inference_steps: int = Field(ge=1, le=1000)
    guidance_scale: float = Field(ge=0, le=100)
    batch: int = Field(default=1, ge=1, le=4096)
    text: Literal["prompts", "embeddings"] = "prompts"

    @field_validator("seeds")
    @classmethod
    def _seeds_fit_a_generator(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if not 0 <= seed < 2**63:
                raise ValueError(f"seed {seed} is outside 0 .. 2**63 - 1")
        return seeds

    @property
    def num_pictures(self) -> int:
        """The number of images: prompts x seeds."""
        return len(self.prompts) * len(self.seeds)

    @property
    def pixel_steps(self) -> int:
        """Pixels x images x denoising steps."""
        return self.height * self.width * self.num_inference_steps * self.num_pictures

    def pictures(self) -> Iterator[tuple[int, str, int]]:
        """Yield (index, prompt, seed) in order: every prompt at the first seed, then at the second, ...

        So a measurement that stops early has used as many prompts as possible.
        """
        index = 0
        for seed in self.seeds:
            for prompt in self.prompts:
                yield index, prompt, seed
                index += 1

    def calls(self) -> list[list[tuple[int, str, int]]]:
        """Return the images in order, `batch` per call, the last call filled up with the first images."""
        pictures = list(self.pictures())
        return [
            [pictures[(start + k) % len(pictures)] for k in range(self.batch)]
            for start in range(0, len(pictures), self.batch)
        ]
