"""A CLIP tokenizer for tinyworld's vocabulary.

CLIPTokenizer is byte-pair encoding: letters, joined by a list of merges. The merges are trained on the vocabulary until
each word is one token. Encoding applies the merges in order to the same letters, so every word stays whole, whatever
parts it shares with others. Unknown words are split into parts and letters; other characters become <|unk|>.
"""

import string
from collections import Counter
from itertools import pairwise

from transformers import CLIPTokenizer

from tinyworld.words import vocabulary

MAX_LENGTH = 32
"""Tokens a prompt may take, with the start and the end."""
BOS, EOS, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unk|>"
_END = "</w>"


def train_merges(words: list[str]) -> list[tuple[str, str]]:
    """Merges, most frequent pair first (ties by spelling), until every word is one symbol."""
    spellings = [[*word[:-1], word[-1] + _END] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        pairs = Counter(pair for symbols in spellings for pair in pairwise(symbols))
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols in spellings:
            i = 0
            while i + 1 < len(symbols):
                if (symbols[i], symbols[i + 1]) == best:
                    symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
                i += 1


def build() -> CLIPTokenizer:
    """The tokenizer. Ids: printable ASCII, the same at a word's end, the merges, then the three special tokens."""
    characters = [c for c in string.printable if c.isprintable() and c != " " and not c.isupper()]
    merges = train_merges([word for word in vocabulary() if len(word) > 1])
    symbols = [*characters, *(c + _END for c in characters), *(a + b for a, b in merges), UNKNOWN, BOS, EOS]
    return CLIPTokenizer(
        vocab={symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))},
        merges=merges,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_LENGTH,
    )


def encode(tokenizer: CLIPTokenizer, captions: list[str]) -> list[list[int]]:
    """(N, 32) token ids, cut and padded as StableDiffusionPipeline does it."""
    return tokenizer(captions, padding="max_length", truncation=True, max_length=MAX_LENGTH).input_ids
