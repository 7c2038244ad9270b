"""Sharding of a denoiser's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.machinery.multi_gpu.fused_exchange import PeerMemory


@dataclass(frozen=True)
class Sharding:
    """How the tokens of a denoiser are sharded: collectives per attention (None: by the input), and memory that the
    GPUs write to each other."""

    num_collectives: int | None
    memory: PeerMemory | None = None
