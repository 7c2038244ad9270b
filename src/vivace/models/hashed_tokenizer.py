"""A tokenizer without a vocabulary file: every word has an id, spread over the whole vocabulary by a hash.

Models with random weights know no words, but their text encoders are to do their real work: as many tokens as the
published model's, ids all over the embedding table, start, end and padding where they belong.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

_PIECES = re.compile(r"[^\W\d_]{1,6}|\d|[^\w\s]|_")
"""Up to six letters are one token, and so is each digit or sign: about as many as byte-pair encoding makes."""


@dataclass(frozen=True)
class Tokens:
    """What a call returns: `input_ids` and `attention_mask`, (prompts, tokens), tensors or lists; flat lists of one
    prompt that was not in a list, as transformers has it."""

    input_ids: Any
    attention_mask: Any


@dataclass(frozen=True)
class HashedTokenizer:
    """Stands in for CLIPTokenizer or T5TokenizerFast in a pipeline.

    Attributes:
        model_max_length: tokens that a prompt is cut or filled to, with start and end.
        first_word, last_word: the ids that words are spread over, both included.
        start: the id before the words, or None (T5).
        end, padding: the ids after them.
    """

    model_max_length: int
    first_word: int
    last_word: int
    start: int | None
    end: int
    padding: int

    def __call__(
        self,
        text: str | list[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Tokens:
        """The arguments are those of transformers' tokenizers that diffusers' pipelines use; others are ignored."""
        prompts = [text] if isinstance(text, str) else text
        limit = self.model_max_length if max_length is None else max_length
        rows = [self._ids(prompt, limit if truncation else None) for prompt in prompts]
        width = limit if padding == "max_length" else max(len(row) for row in rows) if padding else 0
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        rows = [row + [self.padding] * (width - len(row)) for row in rows]
        if return_tensors == "pt":
            import torch

            return Tokens(torch.tensor(rows), torch.tensor(mask))
        return Tokens(rows[0], mask[0]) if isinstance(text, str) else Tokens(rows, mask)

    def tokenize(self, text: str) -> list[str]:
        return _PIECES.findall(text.lower())

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        """Hashes cannot be read backwards: the ids themselves. Pipelines log them for what they cut off."""
        return [" ".join(f"<{int(i)}>" for i in row) for row in rows]

    def __len__(self) -> int:
        """Tokens that there are."""
        special = [token for token in (self.start, self.end, self.padding) if token is not None]
        return max(self.last_word, *special) + 1

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """None: textual inversion has nothing to look up."""
        return {}

    def _ids(self, prompt: str, limit: int | None) -> list[int]:
        count = self.last_word - self.first_word + 1
        words = [self.first_word + zlib.crc32(piece.encode()) % count for piece in self.tokenize(prompt)]
        start = [] if self.start is None else [self.start]
        if limit is not None:
            words = words[: max(0, limit - len(start) - 1)]
        return [*start, *words, self.end]


def tokenizer_for(config: Any, length: int) -> HashedTokenizer:
    """The tokenizer that goes with a text encoder's config (transformers' CLIPTextConfig or T5Config).

    Args:
        length: tokens for every prompt.
    """
    if config.model_type == "t5":
        # 0 to 2 are padding, end, unknown; the last hundred and a few are sentinels of T5's training, or unused.
        last = config.vocab_size - 129 if config.vocab_size > 1000 else config.vocab_size - 1
        return HashedTokenizer(length, 3, last, start=None, end=1, padding=0)
    # CLIP's start and end are the two highest ids. Encoders with the published eos_token_id of 2 read the pooled
    # vector where the id is highest, so the end must be; it is the padding, too.
    end = config.vocab_size - 1
    return HashedTokenizer(length, 0, end - 2, start=end - 1, end=end, padding=end)
