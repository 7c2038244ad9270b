"""Projection of a time measured on one GPU to another one, by their data sheets.

A call consists of arithmetic, whose time is proportional to the chip's speed, and the rest: waiting for the host, which
does not depend on the chip, and for memory, which does. The division of the rest is unknown, so the answer is an
interval.
"""

from __future__ import annotations

import math
from functools import cache

from vivace.errors import RecipeError
from vivace.evidence.parsed import resolve
from vivace.foundation.hardware import Chip
from vivace.foundation.stats import Interval

EFFICIENCY = 0.6
"""Share of a chip's rate with fp32 accumulation that matmuls and attention of a model reach together (an H200: 0.5 to
0.7 of a compiled FLUX's call, docs/performance/flux.md)."""
_UNCERTAINTY = 1.6
"""Factor by which times predicted from operations alone may be wrong, either way."""
_HOST_S = 0.015
"""Seconds that a host takes to launch the kernels of a network's call (an H200 waits 19 ms for each step of SD 1.5)."""
_BITS = {"fp8": 8, "int8": 8, "mxfp8": 8, "nvfp4": 4}


@cache
def fewest_bits(recipe: str) -> int:
    """Return the bits of the numbers that a recipe multiplies: 16, 8 or 4; 8 if this version cannot read it."""
    try:
        return min(
            (_BITS.get(technique.arithmetic.precision or "", 16) for technique in resolve(recipe)), default=16
        )
    except RecipeError:
        return 8


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
