"""The GPU of a command: named by memory size, by name, or this machine's."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.foundation.hardware import Chip, Gpu

_SIZE = re.compile(r"\s*([-+]?[\d.]+(?:e[-+]?\d+)?|[-+]?inf|nan)\s*(?:gb?)?\s*", re.IGNORECASE)


def parse_card(value: str) -> float | Gpu:
    """Parse a size in GB, or the name of a GPU, which has one. "4090" is a name.

    Raises:
        ValueError: it is neither.
    """
    from vivace.foundation.hardware import counted, known_gpu, named_gpu

    value = counted(value)[1]
    size = _SIZE.fullmatch(value)
    if size is None or known_gpu(value) is not None:
        return named_gpu(value, "--card")
    number = float(size[1])
    if not 0.1 <= number <= 10_000:
        raise ValueError(f"{value.strip()!r} is not from 0.1 to 10000 GB")
    return number


@dataclass(frozen=True)
class CardMemory:
    """The memory that a recipe must fit, and the card that has it.

    Attributes:
        name: in words.
        gpu: None where only the size is known, or vivace does not know the GPU.
    """

    num_bytes: float
    name: str
    gpu: Gpu | None = None


def card_of(card: float | Gpu | None, gpu: str | None) -> tuple[Chip | None, CardMemory | None]:
    """Return the chip that limits the time, and the memory to fit; None where unknown.

    Args:
        card: a size in GB, or a GPU.
        gpu: its name. Without a card it has the memory to fit, too; without both, this machine's GPU has.

    Raises:
        UsageError: no GPU of this name is known.
    """
    from vivace.foundation.hardware import Gpu, counted, known_gpu, named_gpu, present_gpu

    named = None if gpu is None else named_gpu(counted(gpu)[1])
    if isinstance(card, Gpu):
        return (named or card).chip, CardMemory(card.memory_bytes, card.name, card)
    if card is not None:
        sized = CardMemory(card * 1e9, f"a card of {card:g} GB", named)
        here = present_gpu()
        chip = named or (None if here is None else known_gpu(here.name))
        return None if chip is None else chip.chip, sized
    if named is not None:
        return named.chip, CardMemory(named.memory_bytes, named.name, named)
    return _this_machine()


def _this_machine() -> tuple[Chip | None, CardMemory | None]:
    from vivace.foundation.hardware import known_gpu, present_gpu

    present = present_gpu()
    if present is not None:
        gpu = known_gpu(present.name)
        return None if gpu is None else gpu.chip, CardMemory(present.memory_bytes, present.name, gpu)
    if sys.platform == "linux" and not Path("/dev/kfd").exists():
        return None, None  # neither NVIDIA's driver nor AMD's, known without the seconds that torch takes
    import torch

    if not torch.cuda.is_available():
        return None, None
    total = torch.cuda.get_device_properties(0).total_memory
    return None, CardMemory(float(total), torch.cuda.get_device_name(0))
