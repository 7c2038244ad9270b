"""Exchanges between processes whose FLUX blocks are fused: see `flux_tokens` for how tokens are sharded.

A token's key and value lie side by side, so that those of consecutive tokens are one message.

Imported where a denoiser is sharded.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vivace.machinery.fused.block_forward import Gathering
from vivace.machinery.fused.operations import has_triton
from vivace.machinery.multi_gpu.collectives import start_all_gather, start_broadcast, wait

_ALIGNMENT = 256  # bytes, as of separate allocations
_ABANDONED = 1 << 62  # more than any count of barriers
SWITCH = "VIVACE_PEER_WRITES"
"""The environment variable that turns this off, with 0: keys and values are gathered by NCCL then."""


# An all-gather by NCCL is a kernel, takes multiprocessors from what is computed meanwhile, and is waited for: 6 of 44
# ms of a step of FLUX in fp8 on two H100s (results/peer-writes-before-profile.json). Copies to memory that is mapped
# here are the copy engines', which take none, and a barrier is left. A kernel that writes to other GPUs is no
# substitute: it lasts as long as its writes are on their way, 72 us among four H100s instead of 9. PyTorch's symmetric
# memory allocates the memory and maps it into every process.
class PeerMemory:
    """Memory that all GPUs of a group write to, and a barrier between them."""

    def __init__(self, rank: int, num: int, group: str) -> None:
        # Each process calls its own GPU cuda:0, which PyTorch would take for one GPU.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._rank, self._num, self._group = rank, num, _renamed(group)
        self._arenas: list[tuple[torch.Tensor, ...]] = []
        self._handles: list[Any] = []
        counts = self._shared_bytes(8 * num)
        self._slots = tuple(of_gpu.view(torch.int64) for of_gpu in counts)
        self._slots[rank].zero_()
        self._count = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._abandoned = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._stream = torch.cuda.Stream()  # one, since copies to several GPUs take turns in any case
        self._is_copying = False
        torch.cuda.synchronize()
        dist.barrier()  # until every process has set its slots to zero

    def tensors(
        self, shape: tuple[int, ...], dtype: torch.dtype, number: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return `number` tensors, each as it lies on every GPU, by rank.

        They share the memory with those of other calls, and stay where they are: graphs may contain them. All
        processes call this in the same order; the first call of a size is not captured.
        """
        length = math.prod(shape) * dtype.itemsize
        size = -(-length // _ALIGNMENT) * _ALIGNMENT
        if not self._arenas or self._arenas[-1][0].numel() < number * size:
            self._arenas.append(self._shared_bytes(number * size))  # what is too small stays for its graphs
        arena = self._arenas[-1]
        return [
            tuple(of_gpu[k * size :][:length].view(dtype).view(shape) for of_gpu in arena)
            for k in range(number)
        ]

    def start_copies(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start copying (to, from) what the current stream has written, in parallel with its work until the barrier."""
        self._is_copying = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for there, own in copies:
                there.copy_(own)

    def barrier(self) -> None:
        """Wait, on the current stream, until all GPUs are here; what they wrote before can be read after it."""
        from vivace.machinery.kernels.peer_barrier import peer_barrier

        if self._is_copying:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_copying = False
        peer_barrier(self._count, self._slots, self._abandoned, self._rank)

    def abandon(self) -> None:
        """End this GPU's waits, also those to come: another process has ended. From any thread.

        No call of CUDA, which could wait itself, behind a thread whose launches have filled the queue.
        """
        self._abandoned.fill_(_ABANDONED)

    @property
    def num_bytes(self) -> int:
        """Bytes on each GPU, which PyTorch's own counts leave out."""
        return sum(arena[0].numel() for arena in self._arenas)

    def _shared_bytes(self, number: int) -> tuple[torch.Tensor, ...]:
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(number, dtype=torch.uint8, device=torch.device("cuda", 0))
        handle = symmetric.rendezvous(own, self._group)
        self._handles.append(handle)
        return tuple(
            own if rank == self._rank else handle.get_buffer(rank, (number,), torch.uint8)
            for rank in range(self._num)
        )


_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Sharding:
    """How the tokens of a denoiser are sharded: collectives per attention (None: by the input), and memory that the
    GPUs write to each other."""

    num_collectives: int | None
    memory: PeerMemory | None = None


class FusedExchange:
    """Exchanges of fused blocks: an all-gather of keys and values for each attention, in fp8 half as long."""

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
    """Copies own keys and values to the other GPUs, while the current stream goes on."""

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
    batch, tokens, *head = queries.shape
    return (batch, tokens, 2, *head)


def _joined(gathered: torch.Tensor) -> torch.Tensor:
    return gathered.transpose(0, 1).flatten(1, 2)  # one image's is not copied


def can_write_to_peers(num: int) -> bool:
    """Return whether every GPU of the group can write to the memory of the others. All processes call this.

    Each process sees its own GPU as the first, and those of the next ranks after it.
    """
    if os.environ.get(SWITCH) == "0" or torch.version.hip is not None:
        return False
    able = has_triton() and torch.cuda.device_count() >= num
    able = able and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, num))
    agreed = torch.tensor([float(able)], device="cuda")
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())


def _renamed(group: str) -> str:
    """Return a new, unused name of a process group.

    Some versions of PyTorch remember how to connect to a group by its name, and a later session's group has the same.
    """
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed.distributed_c10d import _resolve_process_group

    name = f"{group}-vivace-{next(_NUMBERS)}"
    _register_process_group(name, _resolve_process_group(group))
    return name
