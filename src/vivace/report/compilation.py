"""The one-off cost of compilation, and the number of images that pay it back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.foundation.spec.record import Record, Round


@dataclass(frozen=True)
class Compilation:
    """Compile time: how many seconds longer the first call was than the median call of the same process.

    fresh_s: in the first process that had to compile; None if all processes loaded their code from the disk cache.
    cached_s: in the first process that loaded all code from the disk cache; None if none did.
    break_even_images: number of images from which a fresh start takes less time than the baseline; None if no gain
        over the baseline was shown.
    """

    fresh_s: float | None
    cached_s: float | None
    break_even_images: int | None

    @property
    def seconds(self) -> float:
        seconds = self.fresh_s if self.fresh_s is not None else self.cached_s
        assert seconds is not None
        return seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "fresh_s": self.fresh_s,
            "cached_s": self.cached_s,
            "break_even_images": self.break_even_images,
        }


def compilation(record: Record, gain_s: float | None) -> Compilation | None:
    """Return the compilation cost of a measured record; None if nothing was compiled.

    Args:
        gain_s: seconds that the recipe saves per image; None if no gain was shown.
    """
    rounds = [r for r in record.rounds if _num(r, "compiled_graphs") and r.first_call_s is not None]
    if not rounds:
        return None
    fresh = _first_compile_time([r for r in rounds if not _is_cached(r)])
    cached = _first_compile_time([r for r in rounds if _is_cached(r)])
    spent = fresh if fresh is not None else cached
    assert spent is not None
    images = max(1, math.ceil(spent / gain_s)) if gain_s is not None and gain_s > 0 else None
    return Compilation(fresh, cached, images)


def _first_compile_time(rounds: Sequence[Round]) -> float | None:
    for round_ in rounds:
        if round_.samples and round_.first_call_s is not None:
            return max(0.0, round_.first_call_s - statistics.median(s.total_s for s in round_.samples))
    return None


def _is_cached(round_: Round) -> bool:
    return _num(round_, "graphs_from_cache") > 0 and _num(round_, "graphs_not_in_cache") == 0


def _num(round_: Round, name: str) -> int:
    value = round_.evidence.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0
