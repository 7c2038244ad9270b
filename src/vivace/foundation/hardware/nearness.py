"""How near a GPU is to another one, by their names."""

from __future__ import annotations

import re
from enum import IntEnum

from vivace.foundation.hardware.names import known_gpu


class Near(IntEnum):
    """How near a device is to the requested one; lower is nearer."""

    SAME = 0
    GENERATION = 1
    OTHER = 2


def near(name: str, other: str) -> Near:
    """Return how near two GPUs are. Sizes of memory make no difference: times hardly depend on them."""
    here, there = known_gpu(name), known_gpu(other)
    if here is None or there is None:
        return Near.SAME if _plain(name) == _plain(other) else Near.OTHER
    if here.chip is there.chip:
        return Near.SAME
    return Near.GENERATION if here.chip.architecture == there.chip.architecture else Near.OTHER


def architecture_of(name: str) -> str | None:
    """Return the architecture of a GPU by its name, such as "Hopper"; None if it is not known."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.chip.architecture


def capability_of(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None if it is not known."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.chip.capability


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.removeprefix("NVIDIA ")).strip().lower()
