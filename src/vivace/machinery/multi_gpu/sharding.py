"""Sharding of a denoiser's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.machinery.multi_gpu.fused_exchange import PeerMemory


@dataclass(frozen=True)
class Sharding:
    """How the tokens of a denoiser are sharded.

    Attributes:
        num_collectives: per attention; None where it depends on the input.
        memory: which the GPUs write to each other; None where they do not.
    """

    num_collectives: int | None
    memory: PeerMemory | None = None
