"""Graphs of language models that encode prompts, one for each of a few lengths instead of one for each prompt's.

Some pipelines give a language model each prompt at its own length. A graph is then captured for the next length of
`bucket_of`: the call gets more tokens behind its last, and what comes back is cut. In a causal model no token sees a
later one, and positions count from the first, so states behind the prompt's own tokens are what they were, on whichever
side the pipeline pads. Matrix products of another number of rows may add in another order: the same numbers within a
rounding of bf16, and often the same bits.

Where all tokens count, the mask is left out: then attention is causal by the kernel's own rule, as it is without a
graph. During a capture transformers cannot read a mask, and would hand attention one that only slower kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vivace.machinery.compilation.captured import Capture, CapturedFunction

_CAUSAL = frozenset(
    {
        "gemma2",
        "glm",
        "llama",
        "ministral3",
        "mistral",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_vl_text",
    }
)
"""Types of configurations of transformers, of models in which no token sees a later one."""

_SHORT = (32, 64, 128, 256)
_STEP = 128
_ROWS = 64
WORDS_OF_ROWS = (20, 50, 110, 170, 235)
"""Of prompts that meet each length up to 256 tokens, whether a template adds few or the words are the most."""
WORDS_OF_CAPTIONS = (*range(8, 240, 32), 235)
"""Of captions, whose lengths are multiples of 32 tokens."""
_NUM_BUCKETS = 6
"""Lengths up to 512 tokens, which hold nearly all prompts."""

_POSITIONAL = ("input_ids", "attention_mask")

_BESIDE_TEXT = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "inputs_embeds",
    "past_key_values",
    "labels",
)
"""Arguments of calls that are not captured: images are as many tokens as their sizes say, which is read on the host,
and a cache of earlier tokens, for models that write, grows with each call."""


def bucket_of(length: int) -> int:
    """Return the length of the graph for a prompt: up to 256 tokens padding costs nothing, weights are read anyhow."""
    return next((bucket for bucket in _SHORT if length <= bucket), -(-length // _STEP) * _STEP)


def padded_length(length: int) -> int:
    """Return to how many tokens a text of this many is padded where a denoiser's matmuls have a row for each."""
    return -(-length // _ROWS) * _ROWS


def is_causal_language_model(module: Any) -> bool:
    """Return whether a text encoder is a language model in which no token sees a later one."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return False
    text = config.get_text_config()
    return text.model_type in _CAUSAL and getattr(text, "is_causal", True)


class PromptLengths:
    """Calls a language model's graphs, with prompts padded to their lengths, and counts calls that were padded, and
    those beside: with images or earlier tokens, which are not captured. `max_graphs` are kept for each length."""

    def __init__(
        self, forward: Callable[..., Any], device: torch.device, capture: Capture, max_graphs: int
    ) -> None:
        self.num_padded = 0
        self.num_beside = 0
        self._forward = forward
        self.graphs = CapturedFunction(
            lambda **call: _without_cache(forward(**call)), device, capture, max_graphs * _NUM_BUCKETS
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        is_beside = any(call.get(name) is not None for name in _BESIDE_TEXT) or call.get("use_cache")
        if is_beside or len(args) > len(_POSITIONAL):
            self.num_beside += 1
            return self._forward(*args, **kwargs)
        ids = call.get("input_ids")
        if ids is None or not _are_of_each_token(call, ids):
            return self.graphs(**call)
        ends_in_padding, all_count = _read(call.get("attention_mask"))
        if ends_in_padding:  # to the length that this pipeline gives all prompts
            return self.graphs(**call)
        if all_count:
            call["attention_mask"] = None
        batch, length = ids.shape
        bucket = bucket_of(length)
        self.num_padded += bucket > length
        for name in [name for name, value in call.items() if isinstance(value, torch.Tensor)]:
            call[name] = torch.nn.functional.pad(call[name], (0, bucket - length))
        return _shorter(self.graphs(**call), (batch, bucket), length)


def _are_of_each_token(call: dict[str, Any], ids: torch.Tensor) -> bool:
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    return ids.ndim == 2 and all(tensor.shape == ids.shape for tensor in tensors)


def _read(mask: torch.Tensor | None) -> tuple[bool, bool]:
    if mask is None:
        return False, True
    counts = mask.bool()
    last, every = torch.stack([counts[:, -1].any(), counts.all()]).tolist()
    return not last, every


def _shorter(output: Any, rows: tuple[int, int], length: int) -> Any:
    def cut(value: Any) -> Any:
        is_of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == rows
        return value[:, :length].contiguous() if is_of_tokens else value

    return tree_map(cut, output) if length < rows[1] else output


def _without_cache(output: Any) -> Any:
    """Return an output without the keys and values of earlier tokens, which nothing reads but a graph would keep."""
    if getattr(output, "past_key_values", None) is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "past_key_values"})


_AT, _NAME = 2, "cap_feats"
NUM_LENGTHS = 4
"""Captions of up to 128 tokens, which hold most prompts, have as many lengths, and texts padded to 256 tokens."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class PaddedTexts:
    """Calls the graphs of a transformer with texts of a few lengths: its forward has the methods `padded`, of a call's
    arguments, and `compute`."""

    def __init__(self, forward: Any, device: torch.device, capture: Capture, max_graphs: int) -> None:
        self._forward = forward
        self.graphs = CapturedFunction(self._compute, device, capture, max_graphs * NUM_LENGTHS)

    @property
    def num_captured(self) -> int:
        return self.graphs.num_captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._padded(args, kwargs)
        return self.graphs(*args, **kwargs)

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.graphs.has(*self._padded(args, kwargs))

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.graphs.forget(*self._padded(args, kwargs))

    def _padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return args, kwargs if args else self._forward.padded(kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward.compute(*args, **kwargs)


class PaddedCaptions(PaddedTexts):
    """Calls the graphs of a transformer with captions as long as it makes them; its `_pad_with_ids` is replaced."""

    def __init__(self, transformer: Any, device: torch.device, capture: Capture, max_graphs: int) -> None:
        super().__init__(transformer.forward, device, capture, max_graphs)
        self._device = device
        self._masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        _replace_padding(transformer, self._masks)

    def _padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments of `_compute`: masks, then those of the forward with longer captions."""
        from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

        captions = _captions(args, kwargs)
        if not _are_captions(captions):  # those of several images, which the transformer mixes
            return ([], *args), kwargs
        lengths = [len(caption) for caption in captions]
        longer = [-(-length // SEQ_MULTI_OF) * SEQ_MULTI_OF for length in lengths]
        pairs = zip(lengths, longer, strict=True)
        masks = [torch.arange(more, device=self._device) >= length for length, more in pairs]
        padded = [_padded_to(length, caption) for length, caption in zip(longer, captions, strict=True)]
        if len(args) > _AT:
            return (masks, *args[:_AT], padded, *args[_AT + 1 :]), kwargs
        return (masks, *args), kwargs | {_NAME: padded}

    def _compute(self, masks: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
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
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(each, torch.Tensor) and each.ndim == 2 and len(each) for each in value)


def _padded_to(length: int, caption: torch.Tensor) -> torch.Tensor:
    more = length - len(caption)
    return torch.cat([caption, caption[-1:].expand(more, -1)]) if more else caption.contiguous()
