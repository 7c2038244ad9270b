"""Criteria of a recommendation."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from vivace.errors import UsageError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task

Goal = Literal["latency", "memory", "throughput", "cost", "stability"]
GOALS: dict[Goal, str] = {
    "latency": "seconds an image, one at a time",
    "memory": "peak memory",
    "throughput": "images a second, over all batch sizes",
    "cost": "money an image, over all batch sizes",
    "stability": "how little single calls differ",
}
_UNITS = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}


class Criteria(Spec):
    """The requirements that a recommended recipe must meet, and the goal.

    Attributes:
        model: a name of the catalogue, `synthetic:NAME`, or whatever the records call it.
        gpu: None for this machine's GPU, or any if it has none.
        num_gpus: how many of them were named.
        max_bytes: a hard limit on peak memory.
        limits: quality that a recipe's images must be proven to keep; None: they must not have failed the gate's usual
            limits.
        price_per_hour: of the GPU, in any currency.
        same_picture: only recipes that keep the image.
        task: what the images start from.
    """

    model: str = Field(min_length=1)
    gpu: str | None = None
    num_gpus: int = Field(default=1, ge=1)
    max_bytes: float | None = Field(default=None, gt=0)
    limits: Limits | None = None
    goal: Goal = "latency"
    price_per_hour: float | None = Field(default=None, gt=0)
    same_picture: bool = False
    task: Task = "text"


def parse_size(text: str) -> float:
    """Return the bytes of "12GB" (1e9 each) or "12GiB"; a number alone is in GB.

    Raises:
        UsageError: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", text, re.I | re.ASCII)
    factor = None if match is None else _UNITS.get(match.group(2).lower() or "gb")
    if match is None or factor is None or float(match.group(1)) * factor < 1:
        raise UsageError(f"{text[:60]!r} is not a size of memory; give for example 12GB or 12GiB")
    return float(match.group(1)) * factor
