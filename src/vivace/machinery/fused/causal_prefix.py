"""Tokens in front of an image that attend to nothing behind them, so that their keys and values are the same in each
step: Qwen-Image 2.1's text, and images to be edited.

Where attention can leave out keys, kept ones are padded with zeros to one of a few lengths and come behind the image's,
so that later steps of prompts of many lengths have the same shapes: one plan of cuDNN's, and one CUDA graph.

Attention of the step that computes them goes segment by segment: words attend to all in front of them and to
themselves, an image's tokens to all of it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.machinery.compilation.captured import never_written_again
from vivace.machinery.fused import operations
from vivace.machinery.fused.operations import AttentionScales

Segment = tuple[int, int, bool]
"""Where a segment starts and ends, and whether it is text."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (tokens, pairs) in fp32."""


_PADDED_TO = 128
"""Tokens: nearly all prompts are padded to as many, or to twice as many."""


@dataclass
class Prefix:
    """The tokens in front of an image.

    Attributes:
        length: its tokens.
        segments: of it; None: it was computed in an earlier step.
        rope: of all tokens that are computed.
        mask: (batch, all tokens), which of them are attended to; None: all.
        is_kept: whether later steps will need its keys and values.
        is_padded: keys and values are kept with zeros behind them.
        keys, values: of each block, (batch, length or more, heads, channels), in bf16.
        num_keys: (batch, 1, 1, 1), int32, of a later step: those of the image and of the prefix, if it is padded.
    """

    length: int
    segments: list[Segment] | None
    rope: Tables
    mask: torch.Tensor | None
    is_kept: bool = False
    is_padded: bool = False
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    num_keys: torch.Tensor | None = None

    @property
    def behind(self) -> Prefix:
        """Return the prefix as later steps need it."""
        rope = self.rope[0][self.length :], self.rope[1][self.length :]
        num_keys = None
        if self.is_padded:
            kept, num_all = self.keys[0], len(self.rope[0])
            num_keys = torch.full((len(kept), 1, 1, 1), num_all, dtype=torch.int32, device=kept.device)
            num_keys = never_written_again(num_keys)
        return Prefix(
            self.length, None, rope, self.mask, False, self.is_padded, self.keys, self.values, num_keys
        )

    @property
    def is_computed(self) -> bool:
        """Whether this step computes the prefix's tokens."""
        return self.segments is not None

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the prefix's part of a block's keys and values, if later steps need them."""
        if not self.is_kept:
            return
        num_more = -self.length % _PADDED_TO if self.is_padded else 0
        for kept, made in ((self.keys, keys), (self.values, values)):
            own = made[:, : self.length]
            own = functional.pad(own, (0, 0, 0, 0, 0, num_more)) if num_more else own.clone()
            kept.append(never_written_again(own))

    def before(
        self, block: int, queries: torch.Tensor, scales: AttentionScales | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of all tokens, and the part of each that is to be written: the image's.

        Args:
            queries: of the image, whose dtype keys and values get.
            scales: what they are rounded with, if that is e4m3.
        """
        batch, num_own, *of_token = queries.shape
        kept = (self.keys[block], self.values[block])
        num_kept = kept[0].shape[1]
        start, own = (num_own, slice(num_own)) if self.num_keys is not None else (0, slice(num_kept, None))
        made = [queries.new_empty((batch, num_kept + num_own, *of_token)) for _ in range(2)]
        of_parts = None if scales is None else (scales.queries_keys[1:], scales.values[:1])
        for index, (whole, part) in enumerate(zip(made, kept, strict=True)):
            if of_parts is None:
                whole[:, start : start + num_kept].copy_(part)
                continue
            for image, source in zip(whole, part, strict=True):
                onto = image[start : start + num_kept].flatten(1)
                operations.quantized(source.flatten(1), of_parts[index], onto)
        keys, values = made
        return keys, values, (keys[:, own], values[:, own])


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
