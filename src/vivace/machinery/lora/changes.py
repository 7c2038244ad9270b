"""A LoRA's change of the weight and the bias of one layer, in the forms that files have.

All are sums: W + change. Forms that are none (DoRA, GLoRA, OFT, IA3) depend on W, and `read` refuses them.

Sources: Hu et al., LoRA, arXiv 2106.09685; Yeh et al., LyCORIS, arXiv 2309.14859.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from vivace.machinery.technique import Component

if TYPE_CHECKING:
    import torch

Rows = tuple[tuple[int, int], ...]
"""Slices (first, end) of a weight's rows, in a layer's order."""


class WeightChange(Protocol):
    """A change of a weight."""

    def size(self) -> tuple[int, int]:
        """The number of rows, and of values in a row."""

    def sizes(self) -> str:
        """The sizes of its tensors, for messages."""

    def values(self, device: Any) -> torch.Tensor:
        """Compute the change in fp32: (rows, ...)."""


@dataclass(frozen=True)
class Matrices:
    """scale B A.

    Attributes:
        down: A, (rank, in_features), or (rank, in_channels, height, width) of a convolution.
        up: B, (out_features, rank).
        scale: alpha / rank.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def size(self) -> tuple[int, int]:
        return len(self.up), self.down[0].numel()

    def sizes(self) -> str:
        return f"matrices are {sizes_of(self.down)} and {sizes_of(self.up)}"

    def values(self, device: Any) -> torch.Tensor:
        down, up = _fp32(device, self.down, self.up)
        return self.scale * (up @ down.flatten(1))

    def rows(self, rows: Rows) -> Matrices:
        return replace(self, up=_rows_of(self.up, rows))


@dataclass(frozen=True)
class Tucker:
    """A convolution's B core A with a core (rank, rank, height, width), LyCORIS's LoCon."""

    down: torch.Tensor
    core: torch.Tensor
    up: torch.Tensor
    scale: float

    def size(self) -> tuple[int, int]:
        return len(self.up), self.down[0].numel() * self.core[0, 0].numel()

    def sizes(self) -> str:
        return f"matrices are {sizes_of(self.down)}, {sizes_of(self.core)} and {sizes_of(self.up)}"

    def values(self, device: Any) -> torch.Tensor:
        down, core, up = _fp32(device, self.down.flatten(1), self.core, self.up)
        return self.scale * _tucker(core, up, down)


@dataclass(frozen=True)
class Hadamard:
    """LoHa: the product, value by value, of two B A. With cores, both are Tucker's."""

    factors: tuple[torch.Tensor, ...]
    cores: tuple[torch.Tensor, ...]
    scale: float

    def size(self) -> tuple[int, int]:
        first, second = self.factors[:2]
        if self.cores:  # (rank, out) and (rank, in)
            return first.shape[1], second.shape[1] * self.cores[0][0, 0].numel()
        return len(first), second[0].numel()

    def sizes(self) -> str:
        return f"matrices are {' and '.join(map(sizes_of, self.factors))}"

    def values(self, device: Any) -> torch.Tensor:
        a1, b1, a2, b2 = _fp32(device, *self.factors)
        if self.cores:
            t1, t2 = _fp32(device, *self.cores)
            return self.scale * _tucker(t1, a1.t(), b1) * _tucker(t2, a2.t(), b2)
        return self.scale * (a1 @ b1.flatten(1)) * (a2 @ b2.flatten(1))


@dataclass(frozen=True)
class Kronecker:
    """LoKr: the Kronecker product of two matrices, each whole or itself a product.

    Attributes:
        first, second: one matrix, or the factors A and B of A B; of the second, with a Tucker core behind them.
    """

    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    scale: float

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = self.first[0].shape if len(self.first) == 1 else (len(self.first[0]), self.first[1].shape[1])
        if len(self.second) == 3:
            a, b, core = self.second
            second: Sequence[int] = (a.shape[1], b.shape[1], *core.shape[2:])
        elif len(self.second) == 2:
            second = (len(self.second[0]), *self.second[1].shape[1:])
        else:
            second = self.second[0].shape
        return tuple(first), tuple(second)

    def size(self) -> tuple[int, int]:
        first, second = self._shapes()
        return first[0] * second[0], first[1] * math.prod(second[1:])

    def sizes(self) -> str:
        return f"matrices are {' and '.join(map(sizes_of, (*self.first, *self.second)))}"

    def values(self, device: Any) -> torch.Tensor:
        import torch

        first, second = _fp32(device, *self.first), _fp32(device, *self.second)
        left = first[0] if len(first) == 1 else first[0] @ first[1]
        if len(second) == 3:
            other = _tucker(second[2], second[0].t(), second[1])
        else:
            other = second[0] if len(second) == 1 else second[0] @ second[1].flatten(1)
        other = other.reshape(self._shapes()[1])
        product = torch.kron(left.reshape(*left.shape, *[1] * (other.dim() - 2)), other.contiguous())
        return self.scale * product.flatten(1)


@dataclass(frozen=True)
class Whole:
    """The change itself, as a whole tensor."""

    tensor: torch.Tensor

    def size(self) -> tuple[int, int]:
        return len(self.tensor), self.tensor[0].numel()

    def sizes(self) -> str:
        return f"change is {sizes_of(self.tensor)}"

    def values(self, device: Any) -> torch.Tensor:
        return _fp32(device, self.tensor)[0]


@dataclass(frozen=True)
class RowsOf:
    """Rows of a change that a file has for several layers in one."""

    whole: WeightChange
    rows: Rows

    def size(self) -> tuple[int, int]:
        return sum(stop - start for start, stop in self.rows), self.whole.size()[1]

    def sizes(self) -> str:
        return self.whole.sizes()

    def values(self, device: Any) -> torch.Tensor:
        return _rows_of(self.whole.values(device), self.rows)


@dataclass(frozen=True)
class LoraLayer:
    """A file's change of one layer: of its weight, its bias, or both."""

    weight: WeightChange | None
    bias: WeightChange | None = None

    @property
    def matrices(self) -> Matrices | None:
        """The two matrices, if the change is nothing else: such a layer can be beside another."""
        return self.weight if isinstance(self.weight, Matrices) and self.bias is None else None


LoraLayers = Mapping[Component, Mapping[str, LoraLayer]]
"""The layers that a file changes, by component and by their names in it."""


def rows_of(change: WeightChange, rows: Rows) -> WeightChange:
    """Return some rows of a change."""
    return change.rows(rows) if isinstance(change, Matrices) else RowsOf(change, rows)


def sizes_of(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one value"


def _rows_of(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    import torch

    return torch.cat([values[start:stop] for start, stop in rows])


def _fp32(device: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    import torch

    return [tensor.to(device, torch.float32) for tensor in tensors]


def _tucker(core: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return (out, in x height x width) of a core (rank, rank, height, width), up (out, rank) and down (rank, in)."""
    import torch

    return torch.einsum("ijhw,oi,jn->onhw", core, up.flatten(1), down).flatten(1)
