"""What takes the place of a skipped step's result: a predictor has two methods, see `engine.Predictor`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.machinery.step_caching.engine import CacheState, Tensors, last_tokens

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Taylor:
    """Continues each tensor as a Taylor series through its last computed values.

    Attributes:
        order: 0 repeats the last value, 1 continues on a straight line, and so on; as long as there are too few values
            the highest order that they allow is used.
        in_fp32: keep the series in fp32, not in the precision of the tensors.
    """

    order: int
    in_fp32: bool = False

    def keep(self, state: CacheState, computed: Tensors) -> Tensors:
        """Return the finite differences up to the order, each divided by the steps between; of all tensors one order
        after the other."""
        num, steps = len(computed), state.step - state.notes.get("computed_at", state.step)
        state.notes["computed_at"], state.notes["dtype"] = state.step, computed[0].dtype
        factors = [tuple(tensor.float() for tensor in computed) if self.in_fp32 else tuple(computed)]
        previous = [state.previous[k : k + num] for k in range(0, len(state.previous), num)]
        for older in previous[: self.order] if steps else ():
            pairs = zip(factors[-1], older, strict=True)
            factors.append(tuple((new - last_tokens(old, new)) / steps for new, old in pairs))
        state.notes["num_tensors"] = num
        return tuple(tensor for tensors in factors for tensor in tensors)

    def predict(self, state: CacheState) -> Tensors:
        num, steps = state.notes["num_tensors"], state.step - state.notes["computed_at"]
        return tuple(self._sum(state.kept[k::num], steps, state.notes["dtype"]) for k in range(num))

    def _sum(self, factors: Tensors, steps: int, dtype: torch.dtype) -> torch.Tensor:
        total = factors[0]
        for order, factor in enumerate(factors[1:], 1):
            total = total + factor * (steps**order / math.factorial(order))
        return total.to(dtype)
