"""How a row of channels is divided, since Triton's blocks are powers of two."""

from __future__ import annotations


def two_blocks(channels: int) -> tuple[int, int]:
    """Return two powers of two that hold a row; the second is 0 if one is exact.

    Rows of a UNet are five times a power of two wide, and FLUX's three times: one block would be a third empty.
    """
    first = 1 << (channels.bit_length() - 1)
    rest = channels - first
    return first, 1 << (rest - 1).bit_length() if rest else 0
