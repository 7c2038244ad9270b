"""The tokenizer of a language model without a vocabulary file: a hash maps each word to an id.

As `vivace.models.hashed_tokenizer`, with what pipelines ask of a language model's tokenizer: the chat template, and
single tokens for its marks ("<|im_start|>"). A template is written here in the form of the published one; only the
number of its tokens matters, since ids are hashes. Checked: Qwen-Image drops the first 34 tokens of each prompt, which
is as long as its template is here; of the 64 of Qwen-Image-Edit three are two tokens each here. Mistral and GLM pad on
the left when published; here every tokenizer pads on the right, which takes the same time.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MARK = r"<\|\w+\|>|</?think>|\[/?[A-Z_]+\]"
_TOKENS = re.compile(rf"{_MARK}|\n+|[^\W\d_]{{1,14}}|\d|[^\w\s]|_")
"""A mark, newlines, a word, a digit or a sign make one token: large vocabularies hold most words."""

IMAGE_MARK = "<|image_pad|>"
"""Text that stands for an image's token in the texts of Qwen's models."""

Message = dict[str, Any]


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, (prompts, tokens), by key or attribute as in transformers."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]

    def to(self, device: Any) -> Encoded:
        return Encoded({name: value.to(device) for name, value in self.items()})


@dataclass
class HashedChatTokenizer:
    """Replaces Qwen2Tokenizer, GemmaTokenizer or the processor of Mistral 3 in a pipeline.

    Attributes:
        model_max_length: number of tokens to which a prompt is truncated or padded where the call names none.
        first_word, last_word: the range of word ids, both included.
        start: ids that begin every text; none of Qwen, two of GLM.
        padding: id of the padding token.
        template: the text of a conversation, from its messages and whether a reply without thinking is to follow.
        padding_side: set by pipelines, and ignored: padding is on the right.
        marks: ids of the tokens that no hash may give, because a model tells them from words.
    """

    model_max_length: int
    first_word: int
    last_word: int
    start: tuple[int, ...]
    padding: int
    template: Callable[[list[Message], bool], str] | None = None
    padding_side: str = "right"
    marks: Mapping[str, int] = field(default_factory=dict)

    def __call__(
        self,
        text: str | list[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Encoded:
        """Tokenize prompts. Takes the transformers arguments that diffusers pipelines use, and ignores others."""
        import torch

        prompts = [text] if isinstance(text, str) else text
        limit = self.model_max_length if max_length is None else max_length
        rows = [self.encode(prompt)[: limit if truncation else None] for prompt in prompts]
        width = limit if padding == "max_length" else max(len(row) for row in rows) if padding else 0
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        rows = [row + [self.padding] * (width - len(row)) for row in rows]
        if return_tensors == "pt":
            return Encoded(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))
        flat = isinstance(text, str)
        return Encoded(input_ids=rows[0] if flat else rows, attention_mask=mask[0] if flat else mask)

    def encode(self, text: str) -> list[int]:
        count = self.last_word - self.first_word + 1
        words = [
            self.marks[token] if token in self.marks else self.first_word + zlib.crc32(token.encode()) % count
            for token in self.tokenize(text)
        ]
        return [*self.start, *words]

    def tokenize(self, text: str) -> list[str]:
        return _TOKENS.findall(text)

    def apply_chat_template(
        self,
        messages: list[Any],
        *,
        tokenize: bool = True,
        enable_thinking: bool = True,
        **call: Any,
    ) -> Any:
        """Return the text of a conversation or, with `tokenize`, the tokens of several."""
        assert self.template is not None
        if not tokenize:
            return self.template(messages, enable_thinking)
        return self([self.template(message, enable_thinking) for message in messages], **call)

    @property
    def pad_token_id(self) -> int:
        return self.padding

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        """Return the ids as text, since hashes cannot be inverted."""
        return [" ".join(f"<{int(i)}>" for i in row) for row in rows]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return self.last_word + 1


def text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _qwen(messages: list[Message], thinking: bool) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{text_of(m)}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n")


def _mistral(messages: list[Message], _: bool) -> str:
    marks = {"system": "SYSTEM_PROMPT", "user": "INST"}
    return "".join(f"[{marks[m['role']]}]{text_of(m)}[/{marks[m['role']]}]" for m in messages)


def chat_tokenizer_for(config: Any, length: int) -> HashedChatTokenizer | None:
    """Return the tokenizer for a language model's config, or None if it is not a language model.

    Args:
        config: of Qwen3, Qwen2.5-VL, Qwen3-VL, Gemma 2, GLM or Mistral 3, as transformers has it.
        length: number of tokens per prompt.
    """
    text = getattr(config, "text_config", config)
    # The last ids are marks: a thousand of them in Mistral's and Qwen's vocabularies.
    last = text.vocab_size - (1001 if text.vocab_size > 100_000 else 1)
    kind = config.model_type
    if kind in ("qwen3", "qwen2_5_vl", "qwen3_vl"):
        # No word may have the id of an image's token.
        last = min(last, getattr(config, "vision_start_token_id", last + 1) - 1)
        marks = {IMAGE_MARK: config.image_token_id} if hasattr(config, "image_token_id") else {}
        return HashedChatTokenizer(length, 0, last, start=(), padding=0, template=_qwen, marks=marks)
    if kind == "mistral3":
        return HashedChatTokenizer(length, 20, last, start=(1,), padding=11, template=_mistral)
    if kind == "gemma2":
        return HashedChatTokenizer(length, 5, last, start=(2,), padding=0)
    if kind == "glm":
        # Its marks, among them the two that begin a text and the padding, are behind 151,329 words.
        words = last + 1 - 223 if text.vocab_size > 100_000 else last - 2
        return HashedChatTokenizer(length, 0, words - 1, start=(words + 2, words + 1), padding=words)
    return None
