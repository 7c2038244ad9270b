"""What processes that hold a part of the tokens each give each other, as the fused forward asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Gathering(Protocol):
    """Keys and values of one attention.

    Attributes:
        own: of own tokens, (batch, own tokens, 2, heads, channels), to be written.
    """

    own: torch.Tensor

    def send(self) -> None:
        """Begin to send them, once they are written."""

    def wait(self) -> torch.Tensor:
        """Return keys and values (batch, all tokens, 2, heads, channels), once all are there."""


class Exchange(Protocol):
    """What processes that hold a part of the tokens each give each other."""

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what the first process computes, which is like another tensor."""

    def gathering(self, queries: torch.Tensor) -> Gathering:
        """Begin an attention whose own keys and values are like these queries."""
