"""The least time of a model's denoising steps on a GPU, from counts and data sheets."""

from __future__ import annotations

import math
import re
from functools import cache

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Embedded
from vivace.errors import RecipeError
from vivace.evidence.parsed import resolve
from vivace.foundation.hardware import Chip, known_gpu
from vivace.foundation.spec.base import Spec
from vivace.foundation.stats import Interval
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints

_SKIPS = re.compile(
    r"cache|cutoff|steps|prune|merging|taylor|pyramid|guidance|distilled|parallel|progressive|scheduler"
)
"""Recipes that compute less than every step in full."""
EFFICIENCY = 0.6
"""Share of a chip's rate with fp32 accumulation that matmuls and attention of a model reach together (an H200: 0.5 to
0.7 of a compiled FLUX's call, docs/performance/flux.md)."""
_UNCERTAINTY = 1.6
"""Factor by which times predicted from operations alone may be wrong, either way."""
_HOST_S = 0.015
"""Seconds that a host takes to launch the kernels of a network's call (an H200 waits 19 ms for each step of SD 1.5)."""
_BITS = {"fp8": 8, "int8": 8, "mxfp8": 8, "nvfp4": 4}


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


@cache
def fewest_bits(recipe: str) -> int:
    """Return the bits of the numbers that a recipe multiplies: 16, 8 or 4; 8 if this version cannot read it."""
    try:
        return min(
            (_BITS.get(technique.facts.arithmetic.precision or "", 16) for technique in resolve(recipe)),
            default=16,
        )
    except RecipeError:
        return 8


# A call consists of arithmetic, whose time is proportional to the chip's speed, and the rest: waiting for the host,
# which does not depend on the chip, and for memory, which does. The division of the rest is unknown, so the answer is
# an interval.
def on_chip(measured_s: float, flop: float, there: Chip, here: Chip, recipe: str) -> Interval:
    """Return the seconds of a call on a chip, from those on another one.

    Args:
        flop: operations of the call, as the model is published.
        there: the chip on which it took `measured_s`.
    """
    bits = fewest_bits(recipe)
    arithmetic_s = min(measured_s, flop / 1e12 / (_rate(there, bits) * EFFICIENCY))
    rest_s = measured_s - arithmetic_s
    slower = _rate(there, bits) / _rate(here, bits)
    narrower = there.bandwidth_gb_s / here.bandwidth_gb_s
    ends = sorted((arithmetic_s * slower + rest_s, arithmetic_s * slower + rest_s * narrower))
    return Interval(math.sqrt(ends[0] * ends[1]), ends[0], ends[1])


def by_operations(flop: float, calls: int, here: Chip) -> Interval:
    """Return the seconds of a recipe without any record.

    Args:
        calls: of networks; each waits for the host, too.
    """
    return around(flop / 1e12 / (here.bf16 * EFFICIENCY) + calls * _HOST_S)


def around(seconds: float) -> Interval:
    """Return a time predicted from operations alone, with its uncertainty."""
    return Interval(seconds, seconds / _UNCERTAINTY, seconds * _UNCERTAINTY)


def _rate(chip: Chip, bits: int) -> float:
    """Return TFLOP/s with fp32 accumulation, as PyTorch multiplies. It halves fp8 of GeForce, as it does bf16."""
    return chip.bf16 * {16: chip.half, 8: chip.eight, 4: chip.four}[bits] / chip.half
