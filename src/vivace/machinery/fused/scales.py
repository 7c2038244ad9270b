"""Scales of a step's e4m3 activations, from bounds: nothing is calibrated, and no largest activation is reduced.

- A LayerNorm's output of C channels has the norm sqrt(C), and no element exceeds that. Modulated by 1 + s and t, no
  element exceeds sqrt(C) max|1 + s| + max|t|, and the norm does not exceed sqrt(C) max|1 + s| + |t|.
- Values and the MLP's hidden channels are products of such a token x and a weight row w, so no element exceeds
  |x| |w| + |b|. GELU and attention do not exceed their inputs. SwiGLU multiplies two of them: each row has a scale of
  its own, from its largest element (see `vivace.machinery.kernels.gates`).
- A text's values are few and known before the step's attention to them: their largest is looked up.

Typical elements are 50 times smaller than these bounds. An integer would lose six of its eight bits to that; e4m3 has
an exponent of its own, 15 binades of normal numbers, and loses none. So one scale does for a whole tensor, which is
what the fastest fp8 matmuls take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vivace.machinery.kernels.reference import scale_of

GROWTH = 1.15
"""Factor by which rounding to e4m3 can enlarge a product of two factors: (1 + 1/16)^2, and a little."""


@dataclass(frozen=True)
class StepScales:
    """The scales of one step, fp32, on the device. Each lies at a multiple of 16 bytes, where cuBLASLt takes them.

    Attributes:
        doubles: (blocks, 2, 2): of the inputs of QKV and of the MLP, for text and image.
        singles: (blocks,): of the block's input.
        values: (all blocks, 2): of values and attention's output, and in single blocks with GELU of the hidden channels
            as well; the scale and its inverse.
        hidden: (double blocks, 2, 2): of the hidden channels; the scale and its inverse, for text and image. None where
            each row has its own.
    """

    doubles: torch.Tensor
    singles: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None


class Bounds(nn.Module):
    """The limits of all blocks' products.

    Args:
        doubles: (blocks, 1 or 2, 2, 2): of QKV's values and, where they have a bound, of the MLP's hidden channels, for
            text and image, the largest norm of a weight's row and the largest bias.
        singles: (blocks, 2): of the values, or of values and hidden channels together.
        starts: which vector of modulations is the first of each double block, and of each single one.
    """

    def __init__(
        self, doubles: torch.Tensor, singles: torch.Tensor, starts: tuple[list[int], list[int]]
    ) -> None:
        super().__init__()
        self.register_buffer("limits", torch.cat([doubles.reshape(-1, 2), singles]))
        self._num_products = doubles.shape[1]
        self._num_doubles = len(doubles)
        of_doubles, of_singles = (
            torch.tensor(each, device=doubles.device, dtype=torch.int64) for each in starts
        )
        # Shifts of the text's and the image's first norm, then of their second; the image's vectors come first.
        shifts = of_doubles[:, None] + torch.tensor([6, 0, 9, 3], device=doubles.device)
        self.register_buffer("shifts", torch.cat([shifts.flatten(), of_singles]), persistent=False)

    def forward(self, modulations: torch.Tensor, channels: int) -> StepScales:
        vectors = modulations.float().unflatten(1, (-1, channels))
        shift = vectors.index_select(1, self.shifts)
        reach = channels**0.5 * (1 + vectors.index_select(1, self.shifts + 1)).abs().amax(dim=-1)
        inputs = scale_of((reach + shift.abs().amax(dim=-1)).amax(dim=0))
        lengths = (reach + shift.norm(dim=-1)).amax(dim=0)
        num = 4 * self._num_doubles
        if self._num_products == 1:
            lengths = torch.cat([lengths[:num].view(-1, 2, 2)[:, 0].flatten(), lengths[num:]])
        outputs = scale_of(lengths * self.limits[:, 0] * GROWTH + self.limits[:, 1])
        of_doubles = outputs[: num * self._num_products // 2].view(-1, self._num_products, 2)
        values = torch.cat([of_doubles[:, 0].amax(dim=1), outputs[of_doubles.numel() :]])
        hidden = of_doubles[:, 1] if self._num_products == 2 else None
        return StepScales(
            doubles=spread(inputs[:num].view(-1, 2, 2))[..., 0],
            singles=spread(inputs[num:])[..., 0],
            values=spread(torch.stack([values, 1 / values], dim=1))[..., 0],
            hidden=None if hidden is None else spread(torch.stack([hidden, 1 / hidden], dim=1))[..., 0],
        )


def scales_of_attention(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks' attention to a text, (blocks,), from their largest values.

    The output is a mean of values, so the largest of them is its bound. Scales are powers of two: images of a batch
    share them, and no other image's text changes how one is rounded.
    """
    scale = scale_of(largest)
    return scale / torch.frexp(scale).mantissa


def spread(scales: torch.Tensor) -> torch.Tensor:
    """Return scales (...) as the first of four elements (..., 4), so that each lies at a multiple of 16 bytes."""
    made = scales.new_zeros((*scales.shape, 4))
    made[..., 0] = scales
    return made
