"""Criteria of a recommendation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task

Goal = Literal["latency", "memory", "throughput", "cost", "stability"]
"""Memory is the peak; throughput and cost are over all batch sizes; stability is how little single calls differ."""


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
