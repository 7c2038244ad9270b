"""Exchanges between processes whose FLUX blocks are fused: see `flux_tokens` for how tokens are sharded.

A token's key and value lie side by side, so that those of consecutive tokens are one message.

Imported where a denoiser is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vivace.machinery.fused.exchange import Gathering
from vivace.machinery.multi_gpu.collectives import start_all_gather, start_broadcast, wait
from vivace.machinery.multi_gpu.peer_memory import PeerMemory, can_write_to_peers


class FusedExchange:
    """Exchanges of the fused blocks of all processes: an all-gather of keys and values for each attention.

    In single blocks it overlaps with the MLP's first layer. In fp8 attention it is half as long.

    Args:
        rank, num: of this process, and of all.
        group: the name of their group.
    """

    memory: PeerMemory | None = None

    def __init__(self, rank: int, num: int, group: str) -> None:
        self._rank, self._num, self._group = rank, num, group

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return a row of the first process's table: a few MB, computed from weights of several GB."""
        return wait(start_broadcast(compute() if self._rank == 0 else torch.empty_like(like), self._group))

    def gathering(self, queries: torch.Tensor) -> Gathering:
        """Begin an attention whose own keys and values are like these queries."""
        return _AllGather(queries.new_empty(_of_both(queries)), self._num, self._group)


class PeerExchange(FusedExchange):
    """The same where GPUs can write to each other's memory: each copies its keys and values to all.

    A barrier before each attention is all that is left. Attentions take turns with two buffers, so a GPU may write the
    next one's keys while another still reads: the barrier between keeps it from being two ahead.
    """

    def __init__(self, rank: int, num: int, group: str, memory: PeerMemory) -> None:
        super().__init__(rank, num, group)
        self.memory: PeerMemory = memory
        self._turn = 0

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        self.begin()
        return super().modulations(compute, like)

    def begin(self) -> None:
        """Begin a forward with the first buffer, once no process reads the previous forward's values there."""
        self.memory.barrier()
        self._turn = 0

    def gathering(self, queries: torch.Tensor) -> Gathering:
        tensors = self.memory.tensors((self._num, *_of_both(queries)), queries.dtype, 2)[self._turn]
        self._turn = 1 - self._turn
        return _PeerCopies(tensors, self._rank, self.memory)


class _AllGather:
    """An all-gather.

    Args:
        own: see `Gathering`.
    """

    def __init__(self, own: torch.Tensor, num: int, group: str) -> None:
        self.own = own
        self._num, self._group = num, group
        self._receiving: torch.Tensor | None = None

    def send(self) -> None:
        receiving = start_all_gather(self.own.view(torch.uint8), self._num, self._group)
        # Gloo would run several at a time, on threads of its own.
        self._receiving = receiving if receiving.is_cuda else wait(receiving)

    def wait(self) -> torch.Tensor:
        assert self._receiving is not None, "nothing was sent"
        return _joined(wait(self._receiving).view(self.own.dtype).unflatten(0, (self._num, -1)))


class _PeerCopies:
    """Copies own keys and values to the other GPUs, while the current stream goes on.

    Args:
        gathered: (processes, batch, own tokens, 2, heads, channels), as they lie on each GPU.
        rank: of this process.
    """

    def __init__(self, gathered: tuple[torch.Tensor, ...], rank: int, memory: PeerMemory) -> None:
        self.own = gathered[rank][rank]
        self._gathered = gathered
        self._rank, self._memory = rank, memory

    def send(self) -> None:
        # Each GPU begins with the next one, so that no two copy to the same.
        others = self._gathered[self._rank + 1 :] + self._gathered[: self._rank]
        self._memory.start_copies((of_gpu[self._rank], self.own) for of_gpu in others)

    def wait(self) -> torch.Tensor:
        self._memory.barrier()
        return _joined(self._gathered[self._rank])


def exchange_of(rank: int, num: int, group: str, device: str) -> FusedExchange:
    """Return how this process exchanges keys and values. All processes call this together."""
    if device == "cuda" and can_write_to_peers(num):
        return PeerExchange(rank, num, group, PeerMemory(rank, num, group))
    return FusedExchange(rank, num, group)


def _of_both(queries: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the keys and values of these queries' tokens."""
    batch, tokens, *head = queries.shape
    return (batch, tokens, 2, *head)


def _joined(gathered: torch.Tensor) -> torch.Tensor:
    """(processes, batch, own tokens, ...) as (batch, all tokens, ...)."""
    return gathered.transpose(0, 1).flatten(1, 2)  # one image's is not copied
