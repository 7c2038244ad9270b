"""Legible? Whether the words that prompts ask for can be read in B's images as in A's.

Of each image it is the share of the letters that are missing or wrong (`share_missed`), paired, with a test of
equivalence over the prompts, as of the witnesses. If A's own words cannot be read, there is no verdict.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.answers.formatting import count
from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import PairFigures, ReadImage
from vivace.proofs.verdicts.same import ProofAnswer, ProofVerdict, decide, difference_in_words

MARGIN = 0.05
"""Share of the letters by which B's images may miss more than A's on average."""
_ILLEGIBLE = 0.5
"""Share of the letters missed in A's images from which its words count as not written."""
HOW_TO_INSTALL = "pip install rapidocr onnxruntime"
_NETWORKS = {"Det": "*_det_*.onnx", "Rec": "*_rec_*.onnx", "Cls": "*_cls_*.onnx"}
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


class RapidReader:
    """RapidOCR on the CPU, by the files of its networks. It reads Latin, Chinese and Japanese."""

    def __init__(self, networks: dict[str, Path], threads: int | None = None) -> None:
        from rapidocr import RapidOCR

        engine = "EngineConfig.onnxruntime."
        limits = {} if threads is None else {f"{engine}intra_op_num_threads": threads}
        paths = {f"{step}.model_path": str(path) for step, path in networks.items()}
        self._read = RapidOCR(params={"Global.log_level": "critical"} | paths | limits)

    def read(self, image: Any) -> str:
        """Return the text in an RGB image (PIL), its lines from top to bottom."""
        import numpy as np

        result = self._read(np.asarray(image)[:, :, ::-1])  # as OpenCV orders colours
        return "\n".join(result.txts or ())


@dataclass(frozen=True)
class ImageText:
    """The text read in an image, and the share of the requested letters that it misses."""

    read: str
    missed: float


@dataclass(frozen=True)
class WordsPair:
    """The words that a prompt asks for, as both images show them."""

    pair: PairFigures
    texts: tuple[str, ...]
    a: ImageText
    b: ImageText

    @property
    def lost(self) -> float:
        """The share of the letters that B misses and A does not."""
        return self.b.missed - self.a.missed

    @property
    def label(self) -> str:
        return f"{' '.join(f'“{text[:60]}”' for text in self.texts)} {self.pair.seed_in_words}"


@dataclass(frozen=True)
class Legibility:
    """The answer, with the pairs in which B loses most first, and the mean shares of the letters missed."""

    answer: ProofAnswer
    pairs: tuple[WordsPair, ...] = ()
    a: float | None = None
    b: float | None = None
    test: EquivalenceTest | None = None
    notes: tuple[str, ...] = ()


def left_out(reason: str) -> Legibility:
    return Legibility(ProofAnswer(ProofVerdict.LEFT_OUT, reason))


NOTHING_READ = left_out("no prompt asks for words in quotes")


def legibility(pairs: Sequence[PairFigures], reader: RapidReader | None) -> Legibility:
    """Return whether B's words are as legible as A's. There is no reader if none is installed."""
    texts = {
        prompt: words for prompt in dict.fromkeys(p.prompt for p in pairs) if (words := words_of(prompt))
    }
    if not texts:
        return NOTHING_READ
    if reader is None:
        return left_out(f"{_asking(len(texts))} for words; to read them in the images: {HOW_TO_INSTALL}")
    compared = _read([pair for pair in pairs if pair.is_complete and pair.prompt in texts], texts, reader)
    if not compared:
        return Legibility(ProofAnswer(ProofVerdict.UNCLEAR, "no pair of images to compare"))
    # Words that are read in no image of either side, as of a script that the reader does not know, tell nothing.
    read = {words.pair.prompt for words in compared if min(words.a.missed, words.b.missed) < 1}
    num_blind = len({words.pair.prompt for words in compared} - read)
    blind = f"{_asking(num_blind)} for words of which no letter is read in any image"
    if not read:
        return left_out(f"A's own words cannot be read: {blind}")
    compared = [words for words in compared if words.pair.prompt in read]
    a, b = (
        sum(missed) / len(compared)
        for missed in zip(*((words.a.missed, words.b.missed) for words in compared), strict=True)
    )
    test = equivalence([w.lost for w in compared], [w.pair.prompt for w in compared], MARGIN)
    ordered = tuple(sorted(compared, key=lambda words: -words.lost))
    return Legibility(_answer(test, a, b, len(compared)), ordered, a, b, test, (blind,) if num_blind else ())


def _asking(number: int) -> str:
    return "1 prompt asks" if number == 1 else f"{number} prompts ask"


def _read(
    pairs: Sequence[PairFigures], texts: dict[str, tuple[str, ...]], reader: RapidReader
) -> list[WordsPair]:
    by_digest: dict[str, str] = {}

    def text_in(image: ReadImage) -> str:
        if image.digest not in by_digest:
            by_digest[image.digest] = reader.read(image.picture)
        return by_digest[image.digest]

    compared = []
    for pair in pairs:
        words = texts[pair.prompt]
        a, b = (ImageText(text, share_missed(words, text)) for text in map(text_in, (pair.a, pair.b)))
        compared.append(WordsPair(pair, words, a, b))
    return compared


def _answer(test: EquivalenceTest, a: float, b: float, number: int) -> ProofAnswer:
    missed = f"of the letters asked for {100 * a:.0f} % are missing or wrong in A, {100 * b:.0f} % in B"
    difference = difference_in_words(test, lambda share: f"{100 * share:+.1f}", " %")
    # Words that are certainly not less legible need not be shown to be no more so.
    is_legible = test.verdict is not Equivalence.UNCLEAR or (test.interval.high or 1.0) < MARGIN
    too_close = f"{missed}, too close to the margin of {100 * MARGIN:g} %"
    return decide(
        (a > _ILLEGIBLE, ProofVerdict.LEFT_OUT, f"A's own words cannot be read: {missed}"),
        (test.verdict is Equivalence.ABOVE, ProofVerdict.FAILED, f"{missed} ({difference})"),
        (is_legible, ProofVerdict.PROVEN, f"{missed}, in {count(number, 'pair')}"),
        (test.needed is None, ProofVerdict.UNCLEAR, too_close),
        (True, ProofVerdict.UNCLEAR, f"{missed}; about {test.needed} prompts with words would tell"),
    )


def find_reader(threads: int | None = None) -> RapidReader | None:
    spec = importlib.util.find_spec("rapidocr")
    if spec is None or spec.origin is None or importlib.util.find_spec("onnxruntime") is None:
        return None
    folder = Path(spec.origin).parent / "models"
    networks = {step: next(iter(sorted(folder.glob(name))), None) for step, name in _NETWORKS.items()}
    present = {step: path for step, path in networks.items() if path is not None}
    return RapidReader(present, threads) if len(present) == len(networks) else None


# Requested words stand in quotes: "…", “…”, „…“, «…», »…«, ‹…›, 「…」, 『…』, ‘…’ and '…'. Apostrophes and marks of
# inches quote nothing. Letters and digits are compared, but not case, spaces and punctuation, which are easily misread.
def words_of(prompt: str) -> tuple[str, ...]:
    texts = []
    for match in _QUOTED.finditer(prompt):
        text = next(group for group in match.groups() if group is not None).strip()
        least = _LEAST_IN_SINGLE if match[0][0] in _SINGLE else 1
        if len(compared_letters(text)) >= least:
            texts.append(text)
    return tuple(texts)


def compared_letters(text: str) -> str:
    """Return the compared part of a text: its letters and digits, in lower case."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in composed if unicodedata.category(c)[0] in "LMN")


def share_missed(texts: tuple[str, ...], read: str) -> float:
    """Return the share of the letters that are missing or wrong: 0 if every word can be read, at most 1.

    Of each word it is the edit distance to the nearest part of the text that was read, so other text in the image,
    and the order of lines, do not count.
    """
    words = [compared_letters(word) for text in texts for word in text.split()]
    line = compared_letters(read)
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
