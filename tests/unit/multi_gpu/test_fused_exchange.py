"""Keys and values that processes copy to each other's memory, with the memory of both in one process."""

from collections.abc import Iterable
from typing import Any

import torch

from vivace.machinery.fused.block_forward import Gathering
from vivace.machinery.multi_gpu.fused_exchange import PeerExchange


class Memory:
    """In place of `PeerMemory`."""

    def __init__(self) -> None:
        self.num_barriers = 0
        self.bytes = torch.zeros(2, 1 << 16, dtype=torch.uint8)

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype, number: int) -> list[Any]:
        length = torch.empty(shape, dtype=dtype).nbytes
        return [
            tuple(of_gpu[k * length :][:length].view(dtype).view(shape) for of_gpu in self.bytes)
            for k in range(number)
        ]

    def start_copies(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for there, own in copies:
            assert there.is_contiguous(), "else a kernel copies"
            assert own.is_contiguous()
            there.copy_(own)

    def barrier(self) -> None:
        self.num_barriers += 1


def exchanges() -> list[PeerExchange]:
    memory: Any = Memory()
    return [PeerExchange(rank, 2, "", memory) for rank in range(2)]


def values(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def sent(exchange: PeerExchange, number: int, *shape: int) -> Gathering:
    """Send keys and values of tokens (batch, tokens, heads, channels)."""
    gathering = exchange.gathering(torch.empty(shape))
    gathering.own.copy_(values(number, shape[0], shape[1], 2, *shape[2:]))
    gathering.send()
    return gathering


def test_all_keys_and_values_are_there_after_the_barrier_in_the_order_of_processes() -> None:
    for batch in (1, 3):
        begun = [sent(exchange, rank, batch, 5, 2, 4) for rank, exchange in enumerate(exchanges())]
        expected = torch.cat([values(rank, batch, 5, 2, 2, 4) for rank in range(2)], dim=1)
        for gathering in begun:
            assert gathering.wait().equal(expected)


def test_the_next_attention_is_written_while_another_gpu_still_reads_the_one_before() -> None:
    ahead, behind = exchanges()
    shape = (1, 5, 2, 4)
    for exchange, number in ((ahead, 0), (behind, 1)):
        gathering = sent(exchange, number, *shape)
    read = gathering.wait()
    before = read.clone()
    sent(ahead, 2, *shape)
    assert read.equal(before)
    sent(ahead, 3, *shape)
    assert not read.equal(before), "two ahead: what a barrier keeps from happening"
