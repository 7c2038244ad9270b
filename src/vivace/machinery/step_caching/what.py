"""What takes the place of a skipped step's result: a predictor has two methods, see `engine.Predictor`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vivace.machinery.step_caching.engine import CacheState, Predictor, Tensors, last_tokens

if TYPE_CHECKING:
    import torch

PredictorName = Literal["taylor", "average_velocity", "dmd"]


def predictor_of(
    name: PredictorName, order: int, levels: Callable[[CacheState], Sequence[float]], *, in_fp32: bool = False
) -> Predictor:
    if name == "dmd":
        return Dmd()
    return AverageVelocity(levels) if name == "average_velocity" else Taylor(order, in_fp32)


@dataclass(frozen=True)
class Taylor:
    """Continues each tensor as a Taylor series through its last computed values, in fp32 or the tensors' precision: of
    order 0 the last value, 1 a straight line, ...; of a lower one while there are too few values."""

    order: int
    in_fp32: bool = False

    def keep(self, state: CacheState, computed: Tensors) -> Tensors:
        """Return the finite differences up to the order, each divided by the steps between, one order after the
        other."""
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


@dataclass(frozen=True)
class AverageVelocity:
    """Continues each tensor over the noise level, by its average between the last two computed steps.

    In a flow of velocity v, u = v - (s - r) du/ds holds for the average u from r to s (MeanFlow's identity), so the
    last computed v and the u that the sampler was moved by tell how v changes. Here u is a sum over steps, and s - r
    the distance from its centre: a velocity that is linear in the noise level is continued exactly.
    """

    levels: Callable[[CacheState], Sequence[float]]

    def keep(self, state: CacheState, computed: Tensors) -> Tensors:
        """Return the tensors, then the change of each with the noise level, in fp32; the latter if it is known."""
        level = self.levels(state)[state.step]
        values = tuple(tensor.float() for tensor in computed)
        slopes: Tensors = ()
        if state.previous:
            moved, width, moment = state.notes["moved"]
            if width and level != moment / width:
                distance = level - moment / width
                pairs = zip(values, moved, strict=True)
                slopes = tuple((new - last_tokens(sum_, new) / width) / distance for new, sum_ in pairs)
        state.notes["computed_at"], state.notes["dtype"] = level, computed[0].dtype
        state.notes["moved"] = (tuple(0 * value for value in values), 0.0, 0.0)
        self._move(state, values)
        return (*values, *slopes)

    def predict(self, state: CacheState) -> Tensors:
        num = len(state.notes["moved"][0])
        distance = self.levels(state)[state.step] - state.notes["computed_at"]
        values = state.kept[:num]
        if len(state.kept) > num:
            values = tuple(
                value + slope * distance for value, slope in zip(values, state.kept[num:], strict=True)
            )
        self._move(state, values)
        return tuple(value.to(state.notes["dtype"]) for value in values)

    def _move(self, state: CacheState, values: Tensors) -> None:
        """Add a step of the sampler: what moves it times the step's width, the width, and its moment."""
        level, after = self.levels(state)[state.step : state.step + 2]
        moved, width, moment = state.notes["moved"]
        step = after - level
        pairs = zip(moved, values, strict=True)
        state.notes["moved"] = (tuple(a + b * step for a, b in pairs), width + step, moment + level * step)


@dataclass(frozen=True)
class Dmd:
    """Continues each tensor as a constant plus one exponential, through its last three computed values.

    The rate is the least squares one of an image's last two changes, a dynamic mode decomposition of rank one, for
    steps at any distance. Through two values it is a straight line.
    """

    def keep(self, state: CacheState, computed: Tensors) -> Tensors:
        num = len(computed)
        values = tuple(tensor.float() for tensor in computed)
        older = tuple(
            last_tokens(old, new) for old, new in zip(state.previous[: 2 * num], values * 2, strict=False)
        )
        kept = (*values, *older)
        times = [state.step, *state.notes.get("times", ())][: len(kept) // num]
        state.notes["times"], state.notes["dtype"] = times, computed[0].dtype
        if len(times) == 3:
            gaps = times[1] - times[2], times[0] - times[1]
            state.notes["rates"] = [self._rate(kept[k::num], *gaps) for k in range(num)]
        return kept

    def predict(self, state: CacheState) -> Tensors:
        times = state.notes["times"]
        num, ahead = len(state.kept) // len(times), state.step - times[0]
        return tuple(self._continued(state, k, num, ahead).to(state.notes["dtype"]) for k in range(num))

    def _continued(self, state: CacheState, k: int, num: int, ahead: int) -> torch.Tensor:
        import torch

        values, times = state.kept[k::num], state.notes["times"]
        if len(times) == 1:
            return values[0]
        share = ahead / (times[0] - times[1])
        if len(times) == 3:
            rate = state.notes["rates"][k]
            share = torch.expm1(rate * ahead) / -torch.expm1(-rate * (times[0] - times[1]))
        return values[0] + (values[0] - values[1]) * share

    def _rate(self, values: Tensors, first: int, second: int) -> torch.Tensor:
        """Return of each image the r with (e^(r second) - 1) / (1 - e^(-r first)) the ratio of its changes."""
        import torch

        new, middle, old = (value.flatten(1) for value in values)
        change, before = new - middle, middle - old
        ratio = (change * before).sum(1) / (before * before).sum(1).clamp(min=1e-30)
        wanted = ratio.clamp(min=1e-6).log()
        rate = wanted * (2 / (first + second))
        for _ in range(6):  # Newton's method on the logarithm, which is nearly straight
            rate = self._safe(rate)
            ahead, behind = torch.expm1(rate * second), -torch.expm1(-rate * first)
            slope = second / -torch.expm1(-rate * second) - first / torch.expm1(rate * first)
            slope = torch.where(rate.abs() < 1e-2, (first + second) / 2, slope)  # digits cancel
            rate = rate - ((ahead / behind).log() - wanted) / slope
        return self._safe(rate).view(-1, *[1] * (values[0].ndim - 1))

    def _safe(self, rate: torch.Tensor) -> torch.Tensor:
        """Return a rate between e^-3 and e^3 a step, and not zero, at which the formulas are 0 / 0: a straight line."""
        import torch

        return torch.where(rate.abs() < 1e-4, 1e-4, rate.clamp(-3, 3))
