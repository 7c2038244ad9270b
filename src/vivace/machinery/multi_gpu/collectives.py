"""The collectives inside sharded attention, alone or overlapped with a linear layer.

Why: a collective that runs while something else is computed costs little. torch.compile would reorder a collective and
    a matmul that it sees, so both are one operator that it does not look into.
Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.

An all-gather concatenates the tensors of all processes in the first dimension. An all-to-all takes flat tensors: the
k-th of `num` equal parts goes to process k, and is replaced by what process k sent.

Imported where a denoiser is sharded, since importing it registers the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.library.custom_op("vivace::collective", mutates_args=())  # type: ignore[untyped-decorator]
def collective(sent: torch.Tensor, gathers: bool, num: int, group: str) -> torch.Tensor:
    return wait(_start(sent, gathers, num, group))


@collective.register_fake  # type: ignore[untyped-decorator]
def _(sent: Any, gathers: bool, num: int, group: str) -> Any:
    return sent.new_empty(_received_shape(sent, gathers, num))


@torch.library.custom_op("vivace::collective_beside_linear", mutates_args=())  # type: ignore[untyped-decorator]
def collective_beside_linear(
    sent: torch.Tensor,
    gathers: bool,
    num: int,
    group: str,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the received tensor, and the output of the linear layer, which is computed meanwhile."""
    receiving = _start(sent, gathers, num, group)
    output = nn.functional.linear(inputs, weight, bias)
    return wait(receiving), output


@collective_beside_linear.register_fake  # type: ignore[untyped-decorator]
def _(sent: Any, gathers: bool, num: int, group: str, inputs: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    received = sent.new_empty(_received_shape(sent, gathers, num))
    return received, inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


def _received_shape(sent: Any, gathers: bool, num: int) -> tuple[int, ...]:
    return ((num if gathers else 1) * sent.shape[0], *sent.shape[1:])


# The operators of torch.distributed themselves: its functions would wrap the pending tensor in a tensor subclass, which
# costs more CPU time than it saves where the result is waited for soon.


def _start(sent: torch.Tensor, gathers: bool, num: int, group: str) -> torch.Tensor:
    return start_all_gather(sent, num, group) if gathers else _start_all_to_all(sent, num, group)


def start_all_gather(sent: torch.Tensor, num: int, group: str) -> torch.Tensor:
    """Begin to gather a tensor of all processes; pass it to `wait` before reading it."""
    return torch.ops._c10d_functional.all_gather_into_tensor(sent, num, group)


def start_broadcast(sent: torch.Tensor, group: str) -> torch.Tensor:
    """Begin to receive the first process's tensor; pass it to `wait` before reading it."""
    return torch.ops._c10d_functional.broadcast(sent, 0, group)


def _start_all_to_all(sent: torch.Tensor, num: int, group: str) -> torch.Tensor:
    sizes = [sent.shape[0] // num] * num
    return torch.ops._c10d_functional.all_to_all_single(sent, sizes, sizes, group)


def wait(receiving: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(receiving)
