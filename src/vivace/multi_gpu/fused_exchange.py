"""What processes exchange whose FLUX blocks are fused: see `flux_tokens` for how tokens are sharded.

Imported where a denoiser is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vivace.fused.operations import KeyValueBuffers
from vivace.multi_gpu.collectives import start_all_gather, start_broadcast, wait
from vivace.multi_gpu.peer_memory import PeerMemory, can_write_to_peers

Received = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class FusedExchange:
    """What the fused blocks of all processes exchange: an all-gather of keys and one of values for each attention.

    In single blocks they overlap with the MLP's first layer. In fp8 attention they are half as long.

    Args:
        rank, num: of this process, and of all.
        group: the name of their group.
    """

    num_collectives = 2
    memory: PeerMemory | None = None

    def __init__(self, rank: int, num: int, group: str) -> None:
        self._rank, self._num, self._group = rank, num, group

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what the first process has in its table: a few MB, computed from weights of several GB."""
        return wait(start_broadcast(compute() if self._rank == 0 else torch.empty_like(like), self._group))

    def buffers(self, shape: tuple[int, ...], dtype: torch.dtype) -> KeyValueBuffers | None:
        """Return where own keys and values of this shape have to be written; None: anywhere."""
        return None

    def start_gathering(self, keys: torch.Tensor, values: torch.Tensor) -> Received:
        """Start to gather (batch, own tokens, heads, channels); return what waits for (batch, all tokens, ...)."""
        receiving = [self._start(own) for own in (keys, values)]

        def received() -> tuple[torch.Tensor, torch.Tensor]:
            found = [_joined(wait(one).view(keys.dtype).unflatten(0, (self._num, -1))) for one in receiving]
            return found[0], found[1]

        return received

    def _start(self, own: torch.Tensor) -> torch.Tensor:
        receiving = start_all_gather(own.contiguous().view(torch.uint8), self._num, self._group)
        # Gloo would run several at a time, on threads of its own.
        return receiving if own.is_cuda else wait(receiving)


class PeerExchange(FusedExchange):
    """The same where GPUs can write to each other's memory: the kernel that makes keys and values writes them to all.

    A barrier before each attention is all that is left. Attentions take turns with two buffers, so a GPU may write the
    next one's keys while another still reads: the barrier between keeps it from being two ahead.
    """

    num_collectives = 1

    def __init__(self, rank: int, num: int, group: str, memory: PeerMemory) -> None:
        super().__init__(rank, num, group)
        self.memory: PeerMemory = memory
        self._turn = 0
        self._all: tuple[torch.Tensor, torch.Tensor] | None = None

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        self.begin()
        return super().modulations(compute, like)

    def begin(self) -> None:
        """Begin a forward with the first buffer, once nobody reads what the forward before has left there."""
        self.memory.barrier()
        self._turn = 0

    def buffers(self, shape: tuple[int, ...], dtype: torch.dtype) -> KeyValueBuffers:
        found = self.memory.tensors((self._num, *shape), dtype, 4)
        keys, values = found[2 * self._turn : 2 * self._turn + 2]
        self._turn = 1 - self._turn
        self._all = keys[self._rank], values[self._rank]
        own = [(keys[gpu][self._rank], values[gpu][self._rank]) for gpu in range(self._num)]
        here = own.pop(self._rank)
        return KeyValueBuffers(*here, tuple(own))

    def start_gathering(self, keys: torch.Tensor, values: torch.Tensor) -> Received:
        assert self._all is not None
        all_keys, all_values = self._all

        def received() -> tuple[torch.Tensor, torch.Tensor]:
            self.memory.barrier()
            return _joined(all_keys), _joined(all_values)

        return received


def exchange_of(rank: int, num: int, group: str, device: str) -> FusedExchange:
    """Return how this process exchanges keys and values. All processes call this together."""
    if device == "cuda" and can_write_to_peers(num):
        return PeerExchange(rank, num, group, PeerMemory(rank, num, group))
    return FusedExchange(rank, num, group)


def _joined(gathered: torch.Tensor) -> torch.Tensor:
    """(processes, batch, own tokens, heads, channels) as (batch, all tokens, heads, channels)."""
    return gathered.transpose(0, 1).flatten(1, 2)  # one picture's is not copied
