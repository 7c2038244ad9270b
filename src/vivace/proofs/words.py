"""The words that a prompt asks for, and the distance of a text read in an image from them.

Requested words stand in quotes: "…", “…”, „…“, «…», »…«, ‹…›, 「…」, 『…』, ‘…’ and '…'. Apostrophes and
marks of inches quote nothing. Letters and digits are compared, but not case, spaces and punctuation, which are easily
misread.
"""

from __future__ import annotations

import re
import unicodedata

_QUOTED = re.compile(
    r"""
      (?<!\w)"([^"]*)"            # not the inches of a 5" screen
    | “([^“”]+)[”“]
    | „([^„“”]+)[“”]
    | ”([^“”]+)”
    | ＂([^＂]+)＂
    | «([^«»]+)» | »([^«»]+)«
    | ‹([^‹›]+)› | ›([^‹›]+)‹
    | 「([^「」]+)」 | 『([^『』]+)』
    | (?<!\w)[‘‚](.+?)[’‘](?!\w)
    | (?<!\w)'(.+?)'(?!\w)        # not the apostrophes of a cat's bowl
    """,
    re.VERBOSE,
)
_SINGLE = "‘‚'"
_LEAST_IN_SINGLE = 2  # letters; rock 'n' roll asks for none


def words_of(prompt: str) -> tuple[str, ...]:
    """Return the texts that a prompt asks for, in their order."""
    texts = []
    for match in _QUOTED.finditer(prompt):
        text = next(group for group in match.groups() if group is not None).strip()
        least = _LEAST_IN_SINGLE if match[0][0] in _SINGLE else 1
        if len(letters(text)) >= least:
            texts.append(text)
    return tuple(texts)


def letters(text: str) -> str:
    """Return the compared part of a text: its letters and digits, in lower case."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in composed if unicodedata.category(c)[0] in "LMN")


def share_missed(texts: tuple[str, ...], read: str) -> float:
    """Return the share of the letters that are missing or wrong: 0 if every word can be read, at most 1.

    Of each word it is the edit distance to the nearest part of the text that was read, so other text in the image,
    and the order of lines, do not count.
    """
    words = [letters(word) for text in texts for word in text.split()]
    line = letters(read)
    distance = sum(_distance(word, line) for word in words)
    return distance / sum(map(len, words))


def _distance(word: str, text: str) -> int:
    """Return the edit distance of a word to the nearest part of a text (Sellers 1980)."""
    above = [0] * (len(text) + 1)
    for row, letter in enumerate(word, 1):
        current = [row]
        for column, other in enumerate(text, 1):
            current.append(
                min(above[column] + 1, current[column - 1] + 1, above[column - 1] + (letter != other))
            )
        above = current
    return min(above)
