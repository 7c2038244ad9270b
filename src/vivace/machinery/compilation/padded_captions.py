"""Graphs of Z-Image's transformer, one for each number of tokens that it computes instead of one for each prompt's.

The transformer itself makes each caption as long as a multiple of 32: behind its own tokens it puts a learnt one, to
which all others attend. Which tokens these are is a mask that it makes of the caption's length, on the host, so a graph
of it serves one length. Here captions are as long as that before the graph, and the mask is one of its inputs. What is
computed stays the same, bit for bit: the transformer lengthens a caption by its last token, and so does this.
Source: diffusers, ZImageTransformer2DModel.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vivace.machinery.compilation.captured import Capture, CapturedFunction

if TYPE_CHECKING:
    import torch

_AT, _NAME = 2, "cap_feats"
_NUM_LENGTHS = 4
"""Captions of up to 128 tokens, which hold most prompts, have as many lengths."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class PaddedCaptions:
    """Calls the graphs of a transformer with captions as long as it makes them.

    Args:
        transformer: its method `_pad_with_ids` is replaced, on the instance.
        device, capture: as of `CapturedFunction`.
        max_graphs: how many graphs are kept for each of the first lengths.

    Attributes:
        graphs: the captured function.
    """

    def __init__(self, transformer: Any, device: torch.device, capture: Capture, max_graphs: int) -> None:
        self._forward = transformer.forward
        self._device = device
        self._masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.graphs = CapturedFunction(self._with_masks, device, capture, max_graphs * _NUM_LENGTHS)
        _replace_padding(transformer, self._masks)

    @property
    def num_captured(self) -> int:
        return self.graphs.num_captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._padded(args, kwargs)
        return self.graphs(*args, **kwargs)

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments would replay a graph captured before."""
        return self.graphs.has(*self._padded(args, kwargs))

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the next call with these arguments capture anew."""
        self.graphs.forget(*self._padded(args, kwargs))

    def _padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments of `_with_masks`: masks, then those of the forward with longer captions."""
        from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

        captions = _captions(args, kwargs)
        if not _are_captions(captions):  # those of several images, which the transformer mixes
            return ([], *args), kwargs
        lengths = [len(caption) for caption in captions]
        longer = [-(-length // SEQ_MULTI_OF) * SEQ_MULTI_OF for length in lengths]
        masks = [_mask(*pair, self._device) for pair in zip(lengths, longer, strict=True)]
        padded = [_padded_to(length, caption) for length, caption in zip(longer, captions, strict=True)]
        if len(args) > _AT:
            return (masks, *args[:_AT], padded, *args[_AT + 1 :]), kwargs
        return (masks, *args), kwargs | {_NAME: padded}

    def _with_masks(self, masks: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if masks:
            self._masks[:] = zip(_captions(args, kwargs), masks, strict=True)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._masks.clear()


def _replace_padding(transformer: Any, masks: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Make a transformer use the masks of these captions, in which it would see no padding."""
    pad = transformer._pad_with_ids

    @functools.wraps(pad)
    def pad_with_ids(feat: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        feats, ids, mask, *rest = pad(feat, *args, **kwargs)
        own = next((own for caption, own in masks if caption is feat), mask)
        return feats, ids, own, *rest

    transformer._pad_with_ids = pad_with_ids


def _captions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[_AT] if len(args) > _AT else kwargs.get(_NAME)


def _are_captions(value: Any) -> bool:
    import torch

    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(each, torch.Tensor) and each.ndim == 2 and len(each) for each in value)


def _padded_to(length: int, caption: torch.Tensor) -> torch.Tensor:
    """Return a caption (tokens, channels) with its last token repeated."""
    import torch

    more = length - len(caption)
    return torch.cat([caption, caption[-1:].expand(more, -1)]) if more else caption.contiguous()


def _mask(length: int, longer: int, device: torch.device) -> torch.Tensor:
    """Return which tokens are padding, (longer,)."""
    import torch

    return torch.arange(longer, device=device) >= length
