"""The least time of a model's denoising steps on a GPU, from counts and data sheets."""

from __future__ import annotations

import re

from vivace.evidence.recommendation.projection import fewest_bits
from vivace.foundation.hardware import known_gpu
from vivace.foundation.spec.base import Spec
from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Embedded
from vivace.runtime.memory.footprints import footprints
from vivace.runtime.memory.predict import Prediction

_SKIPS = re.compile(
    r"cache|cutoff|steps|prune|merging|taylor|pyramid|guidance|distilled|parallel|progressive|scheduler"
)
"""Recipes that compute less than every step in full."""


class ChipLimit(Spec):
    """The least seconds of an image at a model's own size, if every step is computed.

    Attributes:
        gpu: as the data sheet calls it.
        steps: of the workload.
        step_flop: of one step, guidance included.
        half_s, eight_s, four_s: with all matmuls in 16 bits, in 8, and in 4.
    """

    gpu: str
    steps: int
    step_flop: int
    half_s: float
    eight_s: float
    four_s: float

    def allows(self, recipe: str, seconds: float) -> bool:
        """Whether a recipe can be this fast; True for recipes that leave work out."""
        return seconds >= self.least_s(recipe)

    def least_s(self, recipe: str) -> float:
        """Return the least seconds of a recipe; 0 for recipes that leave work out."""
        if _SKIPS.search(recipe):
            return 0.0
        return {16: self.half_s, 8: self.eight_s, 4: self.four_s}[fewest_bits(recipe)]


def chip_limit(model: str, gpu: str | None, steps: int | None = None) -> ChipLimit | None:
    """Return the limit of a model of the catalogue; None if the GPU's data sheet is not known.

    Args:
        steps: of the workload; None for the model's own.
    """
    published, named = footprints().get(model), None if gpu is None else known_gpu(gpu)
    if published is None or named is None or isinstance(CATALOGUE[model].origin, Embedded):
        return None
    chip, step_flop = named.chip, flop_of_step(published)
    steps = steps or published.num_inference_steps
    tera = steps * step_flop / 1e12
    return ChipLimit(
        gpu=chip.name,
        steps=steps,
        step_flop=step_flop,
        half_s=tera / chip.half,
        eight_s=tera / chip.eight,
        four_s=tera / chip.four,
    )


def flop_of_step(published: Prediction) -> int:
    """Return the operations of one step of the denoiser, guidance included."""
    flop = sum(
        part.gemm_flop + part.conv_flop + part.attention_flop
        for part in published.work.components
        if part.component == "denoiser"
    )
    return round(flop / published.num_inference_steps)


def flop_of_call(published: Prediction) -> int:
    """Return the operations of a whole call."""
    return sum(part.gemm_flop + part.conv_flop + part.attention_flop for part in published.work.components)
