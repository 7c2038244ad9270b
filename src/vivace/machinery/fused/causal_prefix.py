"""Tokens in front of an image that attend to nothing behind them, so that their keys and values are the same in each
step: Qwen-Image 2.1's text, and images to be edited.

Attention of the step that computes them goes segment by segment: words attend to all in front of them and to
themselves, an image's tokens to all of it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.machinery.compilation.captured import never_written_again
from vivace.machinery.fused import operations
from vivace.machinery.fused.operations import AttentionScales

Segment = tuple[int, int, bool]
"""Where a segment starts and ends, and whether it is text."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (tokens, pairs) in fp32."""


@dataclass
class Prefix:
    """The tokens in front of an image.

    Attributes:
        length: its tokens.
        segments: of it; None: it was computed in an earlier step.
        rope: of all tokens that are computed.
        mask: (batch, all tokens), which of them are attended to; None: all.
        is_kept: whether later steps will need its keys and values.
        keys, values: of each block, (batch, length, heads, channels), in bf16.
    """

    length: int
    segments: list[Segment] | None
    rope: Tables
    mask: torch.Tensor | None
    is_kept: bool = False
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def behind(self) -> Prefix:
        """Return the prefix as later steps need it."""
        rope = self.rope[0][self.length :], self.rope[1][self.length :]
        return Prefix(self.length, None, rope, self.mask, False, self.keys, self.values)

    @property
    def is_computed(self) -> bool:
        """Whether this step computes the prefix's tokens."""
        return self.segments is not None

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the prefix's part of a block's keys and values, if later steps need them."""
        if not self.is_kept:
            return
        for kept, made in ((self.keys, keys), (self.values, values)):
            kept.append(never_written_again(made[:, : self.length].clone()))

    def before(
        self, block: int, queries: torch.Tensor, scales: AttentionScales | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of all tokens, and the part of each that is to be written: the image's.

        Args:
            queries: of the image, whose dtype keys and values get.
            scales: what they are rounded with, if that is e4m3.
        """
        batch, num_own, *of_token = queries.shape
        made = [queries.new_empty((batch, self.length + num_own, *of_token)) for _ in range(2)]
        kept = (self.keys[block], self.values[block])
        of_parts = None if scales is None else (scales.queries_keys[1:], scales.values[:1])
        for index, (whole, part) in enumerate(zip(made, kept, strict=True)):
            if of_parts is None:
                whole[:, : self.length].copy_(part)
                continue
            for image, source in zip(whole, part, strict=True):
                operations.quantized(source.flatten(1), of_parts[index], image[: self.length].flatten(1))
        keys, values = made
        return keys, values, (keys[:, self.length :], values[:, self.length :])


# cuDNN makes a plan for each number of tokens, which takes longer than the one step that this attention is of. The
# other kernels take any number.
_ANY_LENGTH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def attend_in_blocks(qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], prefix: Prefix) -> torch.Tensor:
    """Return attention's output (batch, tokens, heads, channels) of a prefix and the image behind it, in bf16."""
    assert prefix.segments is not None
    q, k, v = (each.transpose(1, 2) for each in qkv)
    length = q.shape[2]
    parts = []
    for start, end, is_text in (*prefix.segments, (prefix.length, length, False)):
        mask = None if prefix.mask is None else prefix.mask[:, None, None, :end]
        is_causal = is_text and start == 0 and mask is None
        if is_text and not is_causal:
            causal = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
            mask = causal if mask is None else causal & mask
        with sdpa_kernel([*_ANY_LENGTH], set_priority=True):
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=mask, is_causal=is_causal
                )
            )
    return torch.cat(parts, dim=2).transpose(1, 2)
