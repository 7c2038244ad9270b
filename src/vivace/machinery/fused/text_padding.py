"""What a pipeline pads its text with, left out in front of a transformer's forward.

Krea 2's pads every text to 512 tokens and masks the rest in all attention, so that nothing depends on it. Left out,
a step has fewer tokens, and no mask, which attention in e4m3 does not take.
"""

from __future__ import annotations

from typing import Any

import torch

from vivace.machinery.fused.refusals import refuse_extras

_TEXTS = 2
"""Masks that are remembered: of guidance's two calls."""


class DroppedPadding:
    """A hook in front of the forward. Tokens that are masked in all rows of a batch are left out.

    Which these are is read from the device once for each mask, not in each step.

    Attributes:
        num_dropped: tokens that the last call had fewer.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor, bool]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the transformer in another process begins anew."""
        return self.__dict__ | {"_seen": []}

    def __call__(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refuse_extras(kwargs.get("attention_kwargs"))
        mask = kwargs.get("encoder_attention_mask")
        if mask is None:
            return args, kwargs
        if mask.is_meta:  # any length may be; the longest is predicted
            return args, kwargs | {"encoder_attention_mask": None}
        kept, is_whole = self._kept(mask)
        num_words = mask.shape[1]
        self.num_dropped = num_words - len(kept)
        positions = kwargs["position_ids"]
        return args, kwargs | {
            "encoder_hidden_states": kwargs["encoder_hidden_states"].index_select(1, kept),
            "encoder_attention_mask": None if is_whole else mask.index_select(1, kept),
            "position_ids": torch.cat([positions[:num_words].index_select(0, kept), positions[num_words:]]),
        }

    def _kept(self, mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return which tokens any row has, and whether all rows have these."""
        for seen, version, kept, is_whole in self._seen:
            if seen is mask and version == mask._version:
                return kept, is_whole
        kept = mask.bool().any(dim=0).nonzero()[:, 0]
        is_whole = bool(mask.index_select(1, kept).all())
        self._seen = [*self._seen[1 - _TEXTS :], (mask, mask._version, kept, is_whole)]
        return kept, is_whole
