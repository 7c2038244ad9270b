"""Fixed schedules of cache hits, and the count of computed and skipped steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vivace.machinery.step_caching.cache_state import CacheState, IsHit, Look


def evenly_spaced(share: float) -> IsHit:
    """Make this share of the steps hits, evenly spaced, but never the first step."""

    def is_hit(state: CacheState, _: Look) -> bool:
        step = state.step
        return step > 0 and math.floor(step * share) > math.floor((step - 1) * share)

    return is_hit


def never(_: CacheState, __: Look) -> bool:
    """Compute every step."""
    return False


@dataclass
class StepCounter:
    """Computed and skipped steps since the cache was applied.

    Where guidance takes two calls of the denoiser per step, each call counts.
    """

    computed: int = 0
    skipped: int = 0

    def count(self, is_hit: bool) -> None:
        self.skipped += is_hit
        self.computed += not is_hit

    def evidence(self) -> dict[str, int | float | str]:
        calls = self.computed + self.skipped
        return {"cache_hit_rate": self.skipped / calls if calls else 0.0, "cache_calls": calls}

    def refuted(self, _: dict[str, Any]) -> str | None:
        if self.computed and not self.skipped:
            calls = "1 call" if self.computed == 1 else f"{self.computed} calls"
            return (
                f"the cache never hit in {calls} of the denoiser: an image has too few steps for its share of hits, or "
                "they differ too much for its threshold"
            )
        return None
