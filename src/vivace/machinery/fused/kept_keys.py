"""Keys and values of tokens that later steps do not compute: they are kept in bf16 from the step that does.

In e4m3 they are rounded again in each step, with its scale of values, which depends on the timestep.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vivace.machinery.fused import operations
from vivace.machinery.fused.operations import AttentionPreparation, AttentionScales
from vivace.machinery.fused.scales import StepScales, spread

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, (batch, tokens, heads, channels)."""


def beside(
    kept: Pair, queries: torch.Tensor, scales: AttentionScales | None, kept_first: bool = False
) -> tuple[Pair, Pair]:
    """Return keys and values of all tokens in the queries' dtype, and of each the part of the queries' tokens, to be
    written, behind which the kept ones are, or in front of which."""
    batch, num_own, *of_token = queries.shape
    num_kept = kept[0].shape[1]
    own, others = slice(num_own), slice(num_own, None)
    if kept_first:
        own, others = slice(num_kept, None), slice(num_kept)
    keys, values = (queries.new_empty((batch, num_own + num_kept, *of_token)) for _ in range(2))
    of_parts = None if scales is None else (scales.queries_keys[1:], scales.values[:1])
    for index, (whole, part) in enumerate(zip((keys, values), kept, strict=True)):
        if of_parts is None:
            whole[:, others].copy_(part)
            continue
        for image, source in zip(whole, part, strict=True):
            operations.quantized(source.flatten(1), of_parts[index], image[others].flatten(1))
    return (keys, values), (keys[:, own], values[:, own])


class SourceKeys:
    """Takes keys and values of source images in a forward of all blocks, or gives it some; between forwards it is
    empty.

    In e4m3 the scales of values are kept as well, since a bound of a later step's values is none of these.

    Attributes:
        number: of the tokens to be taken, the image's last; 0: none.
        kept: keys and values of each block, in order.
    """

    def __init__(self) -> None:
        self.number = 0
        self.kept: list[Pair] = []
        self._scales: torch.Tensor | None = None

    def begin(self, number: int, kept: tuple[torch.Tensor, ...] = ()) -> None:
        """Begin a forward that takes keys and values of so many tokens, or is given what `end` has returned."""
        self.number = number
        self.kept = list(zip(kept[::2], kept[1::2], strict=False))
        self._scales = kept[-1] if len(kept) % 2 else None

    def end(self) -> tuple[torch.Tensor, ...]:
        """Return what was taken."""
        taken = tuple(tensor for pair in self.kept for tensor in pair) if self.number else ()
        if taken and self._scales is not None:
            taken = (*taken, self._scales)
        self.begin(0)
        return taken

    @property
    def are_given(self) -> bool:
        return not self.number and bool(self.kept)

    def cover_kept(self, scales: StepScales | None) -> StepScales | None:
        """Return a step's scales, with which the kept values do not exceed e4m3 either."""
        if scales is None:
            return None
        if self.number:
            self._scales = scales.values[:, 0].clone()
        if not self.are_given or self._scales is None:
            return scales
        values = torch.maximum(scales.values[:, 0], self._scales)
        return replace(scales, values=spread(torch.stack([values, 1 / values], dim=1))[..., 0])

    def take(self, qkv: torch.Tensor, preparation: AttentionPreparation, made: Pair, text_last: bool) -> None:
        """Keep keys and values of one block; `made` are its own, which are computed anew where they are rounded."""
        if preparation.scales is not None:
            exact = replace(preparation, scales=None)
            keys, values = (qkv.new_empty(exact.shape_of_keys) for _ in range(2))
            operations.write_attention_inputs(qkv, exact, (None, keys, values))
            made = keys, values
        tokens = preparation.tokens
        end = tokens.text if text_last else tokens.length
        keys, values = (each[:, end - self.number : end].clone() for each in made)
        self.kept.append((keys, values))
