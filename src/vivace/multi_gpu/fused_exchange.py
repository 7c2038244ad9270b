"""What processes exchange whose FLUX blocks are fused: see `flux_tokens` for how tokens are sharded.

Imported where a denoiser is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vivace.multi_gpu.collectives import start_all_gather, start_broadcast, wait


class FusedExchange:
    """What the fused blocks of all processes exchange: an all-gather of keys and one of values for each attention.

    In single blocks they overlap with the MLP's first layer. In fp8 attention they are half as long.

    Args:
        rank, num: of this process, and of all.
        group: the name of their group.
    """

    num_collectives = 2

    def __init__(self, rank: int, num: int, group: str) -> None:
        self._rank, self._num, self._group = rank, num, group

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what the first process has in its table: a few MB, computed from weights of several GB."""
        return wait(start_broadcast(compute() if self._rank == 0 else torch.empty_like(like), self._group))

    def start_gathering(self, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to gather (batch, own tokens, heads, channels); return what waits for (batch, all tokens, ...)."""
        receiving = start_all_gather(own.contiguous().view(torch.uint8), self._num, self._group)
        if not own.is_cuda:
            receiving = wait(receiving)  # Gloo would run several at a time, on threads of its own

        def received() -> torch.Tensor:
            gathered = wait(receiving).view(own.dtype).unflatten(0, (self._num, -1))
            return gathered.transpose(0, 1).flatten(1, 2)  # one picture's is not copied

        return received
