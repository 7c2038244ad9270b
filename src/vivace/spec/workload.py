"""What is drawn: prompts x seeds, size, steps, guidance, batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from vivace.spec.base import Spec

# Pixels x images x denoising steps of one workload. A guard against a typing mistake (--height 100000), far
# above any real study: 1,000 pictures of FLUX at 1024x1024 and 50 steps are half of it.
MAX_PIXEL_STEPS = 10**11


class Workload(Spec):
    """Everything that is fixed while recipes are compared.

    Picture k of a prompt is drawn with its own generator, seeded `seeds[k]`, and alone unless `batch` says otherwise.
    Steps and guidance are the baseline's; a recipe may change them.

    batch: pictures drawn in one call, each from its own seed. The last call of a round trip through the pictures is
        filled up from the start, so that every call has the same shape.
    text: `prompts`, with the text encoders inside the measured call, or `embeddings`, encoded before it.
    """

    prompts: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    height: int = Field(gt=0)
    width: int = Field(gt=0)
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
        return len(self.prompts) * len(self.seeds)

    @property
    def pixel_steps(self) -> int:
        return self.height * self.width * self.num_inference_steps * self.num_pictures

    def pictures(self) -> Iterator[tuple[int, str, int]]:
        """(index, prompt, seed) in drawing order: every prompt at the first seed, then at the second, ...

        A measurement that stops early has then seen every prompt.
        """
        index = 0
        for seed in self.seeds:
            for prompt in self.prompts:
                yield index, prompt, seed
                index += 1

    def calls(self) -> list[list[tuple[int, str, int]]]:
        """The pictures in drawing order, `batch` at a time, the last call filled up from the start."""
        pictures = list(self.pictures())
        return [
            [pictures[(start + k) % len(pictures)] for k in range(self.batch)]
            for start in range(0, len(pictures), self.batch)
        ]
