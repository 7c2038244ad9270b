"""What compiling cost a recipe once, and from how many pictures on that is paid back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.spec.record import Record, Round


@dataclass(frozen=True)
class Compilation:
    """Seconds by which a first call was longer than a steady one of the same process.

    fresh_s: in the first process that had to compile; None if all found their code on disk.
    cached_s: in the first process that found all of it there; None if none did.
    break_even_images: from so many pictures on a fresh start costs less time than the baseline; None: never, since no
        gain over the baseline was shown.
    """

    fresh_s: float | None
    cached_s: float | None
    break_even_images: int | None

    @property
    def seconds(self) -> float:
        found = self.fresh_s if self.fresh_s is not None else self.cached_s
        assert found is not None
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "fresh_s": self.fresh_s,
            "cached_s": self.cached_s,
            "break_even_images": self.break_even_images,
        }


def compilation(record: Record, gain_s: float | None) -> Compilation | None:
    """Of a measured record; None if nothing was compiled.

    Args:
        gain_s: seconds that the recipe saves a picture, None if no gain was shown.
    """
    rounds = [r for r in record.rounds if _num(r, "compiled_graphs") and r.first_call_s is not None]
    if not rounds:
        return None
    fresh = _first([r for r in rounds if not _is_cached(r)])
    cached = _first([r for r in rounds if _is_cached(r)])
    spent = fresh if fresh is not None else cached
    assert spent is not None
    images = max(1, math.ceil(spent / gain_s)) if gain_s is not None and gain_s > 0 else None
    return Compilation(fresh, cached, images)


def _first(rounds: Sequence[Round]) -> float | None:
    for found in rounds:
        if found.samples and found.first_call_s is not None:
            return max(0.0, found.first_call_s - statistics.median(s.total_s for s in found.samples))
    return None


def _is_cached(found: Round) -> bool:
    return _num(found, "graphs_from_cache") > 0 and _num(found, "graphs_not_in_cache") == 0


def _num(found: Round, name: str) -> int:
    value = found.evidence.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0
