"""Keys and values that processes write to each other's memory, with the memory of both in one process."""

from typing import Any

import torch

from vivace.fused.operations import KeyValueBuffers
from vivace.multi_gpu.fused_exchange import PeerExchange


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

    def barrier(self) -> None:
        self.num_barriers += 1


def exchanges() -> list[PeerExchange]:
    memory: Any = Memory()
    return [PeerExchange(rank, 2, "", memory) for rank in range(2)]


def values(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def filled(exchange: PeerExchange, number: int, *shape: int) -> KeyValueBuffers:
    onto = exchange.buffers(shape, torch.float32)
    onto.fill(values(number, *shape), values(number + 1, *shape))
    return onto


def test_all_keys_and_values_are_there_after_the_barrier_in_the_order_of_processes() -> None:
    for batch in (1, 3):
        pair = exchanges()
        shape = (batch, 5, 2, 4)
        waits = []
        for rank, exchange in enumerate(pair):
            onto = filled(exchange, 10 * rank, *shape)
            assert len(onto.elsewhere) == 1
            waits.append(exchange.start_gathering(onto.keys, onto.values))
        for received in waits:
            keys, vals = received()
            assert keys.equal(torch.cat([values(10 * rank, *shape) for rank in range(2)], dim=1))
            assert vals.equal(torch.cat([values(10 * rank + 1, *shape) for rank in range(2)], dim=1))


def test_the_next_attention_is_written_while_another_gpu_still_reads_the_one_before() -> None:
    ahead, behind = exchanges()
    shape = (1, 5, 2, 4)
    for exchange, number in ((ahead, 0), (behind, 10)):
        onto = filled(exchange, number, *shape)
        received = exchange.start_gathering(onto.keys, onto.values)
    keys, _ = received()
    before = keys.clone()
    filled(ahead, 20, *shape)
    assert keys.equal(before)
    filled(ahead, 30, *shape)
    assert not keys.equal(before), "two ahead: what a barrier keeps from happening"


def test_a_forward_begins_with_the_first_buffer_after_a_barrier() -> None:
    exchange, _ = exchanges()
    first = filled(exchange, 0, 1, 5, 2, 4).keys.data_ptr()
    assert filled(exchange, 0, 1, 5, 2, 4).keys.data_ptr() != first
    memory: Any = exchange.memory
    exchange.begin()
    assert memory.num_barriers == 1
    assert filled(exchange, 0, 1, 5, 2, 4).keys.data_ptr() == first
