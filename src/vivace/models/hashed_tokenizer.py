"""A tokenizer without a vocabulary file: a hash maps each word to an id.

Models with random weights have no vocabulary, but their text encoders must do realistic work: as many tokens as the
published model gets, ids from the whole embedding table, and the right start, end and padding tokens.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

from vivace.models.hashed_chat_tokenizer import HashedChatTokenizer, chat_tokenizer_for

_TOKENS = re.compile(r"[^\W\d_]{1,6}|\d|[^\w\s]|_")
"""Up to six letters, a digit or a sign make one token. This gives about as many tokens as byte-pair encoding."""


@dataclass(frozen=True)
class HashedTokens:
    """The result of a call: `input_ids` and `attention_mask`, (prompts, tokens), as tensors or lists.

    As in transformers, they are flat lists for a single prompt that was not in a list.
    """

    input_ids: Any
    attention_mask: Any


@dataclass(frozen=True)
class HashedTokenizer:
    """Replaces CLIPTokenizer or T5TokenizerFast in a pipeline.

    Attributes:
        model_max_length: number of tokens to which a prompt is truncated or padded, start and end included.
        first_word, last_word: the range of word ids, both included.
        start: id of the start token, or None (T5).
        end, padding: ids of the end and padding tokens.
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
    ) -> HashedTokens:
        """Tokenize prompts. Takes the transformers arguments that diffusers pipelines use, and ignores others."""
        prompts = [text] if isinstance(text, str) else text
        limit = self.model_max_length if max_length is None else max_length
        rows = [self._ids(prompt, limit if truncation else None) for prompt in prompts]
        width = limit if padding == "max_length" else max(len(row) for row in rows) if padding else 0
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        rows = [row + [self.padding] * (width - len(row)) for row in rows]
        if return_tensors == "pt":
            import torch

            return HashedTokens(torch.tensor(rows), torch.tensor(mask))
        return HashedTokens(rows[0], mask[0]) if isinstance(text, str) else HashedTokens(rows, mask)

    def tokenize(self, text: str) -> list[str]:
        return _TOKENS.findall(text.lower())

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        """Return the ids as text, since hashes cannot be inverted. Pipelines log it for truncated prompts."""
        return [" ".join(f"<{int(i)}>" for i in row) for row in rows]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        special = [token for token in (self.start, self.end, self.padding) if token is not None]
        return max(self.last_word, *special) + 1

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Empty: there are no added tokens for textual inversion."""
        return {}

    def _ids(self, prompt: str, limit: int | None) -> list[int]:
        count = self.last_word - self.first_word + 1
        words = [self.first_word + zlib.crc32(token.encode()) % count for token in self.tokenize(prompt)]
        start = [] if self.start is None else [self.start]
        if limit is not None:
            words = words[: max(0, limit - len(start) - 1)]
        return [*start, *words, self.end]


def tokenizer_for(config: Any, length: int) -> HashedTokenizer | HashedChatTokenizer:
    """Return the tokenizer for a text encoder's config of transformers: CLIP's, T5's or a language model's.

    Args:
        length: number of tokens per prompt.
    """
    chat = chat_tokenizer_for(config, length)
    if chat is not None:
        return chat
    if config.model_type == "t5":
        # 0 to 2 are padding, end, unknown; the last 128 are sentinels of T5's training, or unused.
        last = config.vocab_size - 129 if config.vocab_size > 1000 else config.vocab_size - 1
        return HashedTokenizer(length, 3, last, start=None, end=1, padding=0)
    # CLIP's start and end are the two highest ids. Encoders with the published eos_token_id of 2 take the pooled vector
    # at the highest id, so that must be the end token. It is also the padding.
    end = config.vocab_size - 1
    return HashedTokenizer(length, 0, end - 2, start=end - 1, end=end, padding=end)
