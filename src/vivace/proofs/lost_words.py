"""The images in which words were lost, as printed."""

from __future__ import annotations

from vivace.proofs.legible import ImageText, Legibility, WordsPair

_MAX_LINES = 6
_LONGEST = 200  # letters of what was read


def lost_most(legibility: Legibility) -> list[WordsPair]:
    """Return the pairs in which B loses the most letters, if any."""
    return [words for words in legibility.pairs if words.lost > 0][:_MAX_LINES]


def read_in_words(text: ImageText) -> str:
    """Return the text read in an image, e.g. “OPFN”, 25 % missed."""
    read = " ".join(text.read.split())
    if not read:
        return "nothing is read"
    shortened = read if len(read) <= _LONGEST else f"{read[:_LONGEST]}…"
    return f"“{shortened}”, {100 * text.missed:.0f} % missed"
