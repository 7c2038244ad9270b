"""What processes that share tokens send to each other inside of attention: alone, or beside a product.

Why: a message that arrives while something else is computed costs nothing. NCCL's messages are kernels: they take
    multiprocessors from the product beside them, or wait until it has ended. A GPU's copy engines need none: with
    `Copies` each process puts what it sends into memory that the others see, and fetches what it gets.
Needs: for `Copies` GPUs of one host that reach each other's memory, as over NVLink.
Source: PyTorch, torch.distributed._symmetric_memory; Wang et al., Overlap Communication with Dependent Computation via
    Decomposition, ASPLOS 2023.

There are two kinds. A *gathered* message gives each process everybody's tensor, one after the other in the first
dimension. In an *exchanged* one, flat, the k-th of `num` equal parts goes to the k-th process, and what came from it
takes that place.

Both are operators that a compiler does not look into: one that saw a message and a product would order them as it
likes. Imported where a denoiser is shared, since its operators are made when it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vivace.multi_gpu.symmetric_memory import Buffer, Memory, OfGPUs, OfProcesses


class Copies:
    """Messages that each process fetches from the others' memory.

    Two buffers take turns. A process writes into one again only after everybody has met at the message in between, and
    has then fetched what was in it. All processes start the same messages in the same order.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._pairs: dict[int, tuple[Buffer, Buffer]] = {}  # by their size in bytes
        self._turn = 0

    def restart(self) -> None:
        """Before each forward, so that all processes agree on whose turn it is. They have met since the last message:
        the end of a forward puts the whole result together."""
        self._turn = 0

    def start(self, sent: torch.Tensor, gathers: bool) -> torch.Tensor:
        """Begin; after `wait` the result holds what arrived."""
        num, rank = self.memory.num, self.memory.rank
        sent = sent.contiguous()
        shape = tuple(sent.shape)
        buffer = self._next(sent.numel() * sent.element_size())
        arriving = sent.new_empty(_arriving_shape(sent, gathers, num))
        parts = arriving.chunk(num)
        # A GPU copies within its own memory by a kernel, which beside a product would wait for its end.
        buffer.of(rank, shape, sent.dtype).copy_(sent)
        parts[rank].copy_(sent if gathers else sent.chunk(num)[rank])
        with self.memory.beside():
            buffer.meet()
            for step in range(1, num):  # each begins with another, so that no GPU has to serve all at once
                peer = (rank + step) % num
                theirs = buffer.of(peer, shape, sent.dtype)
                parts[peer].copy_(theirs if gathers else theirs.chunk(num)[rank])
        return arriving

    def wait(self) -> None:
        self.memory.join()

    def _next(self, num_bytes: int) -> Buffer:
        fitting = [size for size in self._pairs if size >= num_bytes]
        if not fitting:
            self._pairs[num_bytes] = (self.memory.allocate(num_bytes), self.memory.allocate(num_bytes))
        self._turn = 1 - self._turn
        return self._pairs[min(fitting, default=num_bytes)][self._turn]


_COPIES: dict[str, Copies] = {}
"""By the name of the process group, which is all that an operator can be told of it."""


def send_by_copies(group: str, rank: int, num: int, device: str) -> None:
    """From now on this group's messages are fetched. All its processes call this."""
    _COPIES[group] = Copies(OfGPUs(rank, num) if device == "cuda" else OfProcesses(rank, num))


def send_by_collectives() -> None:
    """From now on messages are torch.distributed's, and buffers are let go of."""
    for copies in _COPIES.values():
        copies.memory.close()
    _COPIES.clear()


def let_go() -> None:
    """Another process has ended: let what waits for it here go on."""
    for copies in tuple(_COPIES.values()):
        copies.memory.let_go()


def restart() -> None:
    """Before each forward; see `Copies.restart`."""
    for copies in _COPIES.values():
        copies.restart()


@torch.library.custom_op("vivace::message", mutates_args=())  # type: ignore[untyped-decorator]
def message(sent: torch.Tensor, gathers: bool, num: int, group: str) -> torch.Tensor:
    """What arrived.

    Args:
        gathers: whether it is gathered or exchanged.
    """
    if (copies := _COPIES.get(group)) is not None:
        arriving = copies.start(sent, gathers)
        copies.wait()
        return arriving
    return waited((gathering if gathers else _exchanging)(sent, num, group))


@message.register_fake  # type: ignore[untyped-decorator]
def _(sent: Any, gathers: bool, num: int, group: str) -> Any:
    return sent.new_empty(_arriving_shape(sent, gathers, num))


@torch.library.custom_op("vivace::message_beside_linear", mutates_args=())  # type: ignore[untyped-decorator]
def message_beside_linear(
    sent: torch.Tensor,
    gathers: bool,
    num: int,
    group: str,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrived, and the linear layer's result."""
    copies = _COPIES.get(group)
    if copies is not None:
        arriving = copies.start(sent, gathers)
    else:
        arriving = (gathering if gathers else _exchanging)(sent, num, group)
    product = nn.functional.linear(inputs, weight, bias)
    if copies is not None:
        copies.wait()
        return arriving, product
    return waited(arriving), product


@message_beside_linear.register_fake  # type: ignore[untyped-decorator]
def _(sent: Any, gathers: bool, num: int, group: str, inputs: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    arrived = sent.new_empty(_arriving_shape(sent, gathers, num))
    return arrived, inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


def _arriving_shape(sent: Any, gathers: bool, num: int) -> tuple[int, ...]:
    return ((num if gathers else 1) * sent.shape[0], *sent.shape[1:])


# torch.distributed's operators themselves: around them PyTorch would wrap what is under way in a tensor of a class of
# its own, which costs the CPU more than it saves where somebody waits soon.


def _exchanging(sent: torch.Tensor, num: int, group: str) -> torch.Tensor:
    sizes = [sent.shape[0] // num] * num
    return torch.ops._c10d_functional.all_to_all_single(sent, sizes, sizes, group)


def gathering(sent: torch.Tensor, num: int, group: str) -> torch.Tensor:
    """A gathered message that is under way, by torch.distributed in any case."""
    return torch.ops._c10d_functional.all_gather_into_tensor(sent, num, group)


def waited(arriving: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(arriving)
