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
from typing import Any, Protocol

from vivace.answers.formatting import count
from vivace.errors import Unsupported, UsageError
from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import PairFigures, ReadImage
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict, decide

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


class TextReader(Protocol):
    """Reads the text in an image."""

    def read(self, image: Any) -> str:
        """Return the text in an RGB image (PIL), its lines from top to bottom."""
        ...

    def unknown(self, text: str) -> str:
        """Return the letters of a text that the reader cannot read."""
        ...


class RapidReader:
    """RapidOCR on the CPU. It reads Latin, Chinese and Japanese.

    Args:
        networks: their files, by the name of the step.
        threads: None for all cores.
    """

    def __init__(self, networks: dict[str, Path], threads: int | None = None) -> None:
        import onnxruntime
        from rapidocr import RapidOCR

        engine = "EngineConfig.onnxruntime."
        limits = {} if threads is None else {f"{engine}intra_op_num_threads": threads}
        paths = {f"{step}.model_path": str(path) for step, path in networks.items()}
        self._read = RapidOCR(params={"Global.log_level": "critical"} | paths | limits)
        session = onnxruntime.InferenceSession(str(networks["Rec"]), providers=["CPUExecutionProvider"])
        self._letters = frozenset(session.get_modelmeta().custom_metadata_map["character"].splitlines())

    def read(self, image: Any) -> str:
        """Return the text in an image; see `TextReader.read`."""
        import numpy as np

        result = self._read(np.asarray(image)[:, :, ::-1])  # as OpenCV orders colours
        return "\n".join(result.txts or ())

    def unknown(self, text: str) -> str:
        """Return the letters that are not in its alphabet."""
        composed = unicodedata.normalize("NFKC", text)
        unknown = (c for c in composed if unicodedata.category(c)[0] in "LMN" and c not in self._letters)
        return "".join(dict.fromkeys(unknown))


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
        """The words and the seed, e.g. “OPEN” seed 0."""
        return f"{' '.join(f'“{text[:60]}”' for text in self.texts)} {self.pair.seed_in_words}"


@dataclass(frozen=True)
class Legibility:
    """The answer, with its evidence.

    Attributes:
        pairs: those whose images are both there, the ones in which B loses most first.
        a, b: mean shares of the letters missed; None if nothing was read.
        notes: prompts whose words could not be compared.
    """

    answer: ProofAnswer
    pairs: tuple[WordsPair, ...] = ()
    a: float | None = None
    b: float | None = None
    test: EquivalenceTest | None = None
    notes: tuple[str, ...] = ()


def left_out(reason: str) -> Legibility:
    """Return an answer without readings, with the reason."""
    return Legibility(ProofAnswer(ProofVerdict.LEFT_OUT, reason))


NOTHING_READ = left_out("no prompt asks for words in quotes")


def num_asking(prompts: Sequence[str]) -> int:
    """Return how many prompts ask for words."""
    return sum(bool(words_of(prompt)) for prompt in prompts)


def check_words_can_be_read(prompts: Sequence[str], reader: TextReader | None) -> None:
    """Raise an error if the claim "legible" cannot be checked.

    Raises:
        UsageError: no prompt asks for words.
        Unsupported: no text reader is installed.
    """
    if not num_asking(prompts):
        raise UsageError(
            '--claim legible: no prompt asks for words; put them in quotes, e.g. a shop sign that says "OPEN"'
        )
    if reader is None:
        raise Unsupported(f"--claim legible: no text reader is installed; {HOW_TO_INSTALL}")


def legibility(pairs: Sequence[PairFigures], reader: TextReader | None) -> Legibility:
    """Return whether B's words are as legible as A's.

    Args:
        reader: None if none is installed.
    """
    texts = {
        prompt: words for prompt in dict.fromkeys(p.prompt for p in pairs) if (words := words_of(prompt))
    }
    if not texts:
        return NOTHING_READ
    if reader is None:
        asking = "1 prompt asks" if len(texts) == 1 else f"{len(texts)} prompts ask"
        return left_out(f"{asking} for words; to read them in the images: {HOW_TO_INSTALL}")
    unknown = {
        prompt: letters for prompt, words in texts.items() if (letters := reader.unknown(" ".join(words)))
    }
    notes = _unknown(unknown)
    readable = {prompt: words for prompt, words in texts.items() if prompt not in unknown}
    if not readable:
        return left_out(notes[0])
    complete = [pair for pair in pairs if pair.prompt in readable and pair.is_complete]
    compared = _read(complete, readable, reader)
    if not compared:
        return Legibility(ProofAnswer(ProofVerdict.UNCLEAR, "no pair of images to compare"), notes=notes)
    a = sum(words.a.missed for words in compared) / len(compared)
    b = sum(words.b.missed for words in compared) / len(compared)
    test = equivalence([w.lost for w in compared], [w.pair.prompt for w in compared], MARGIN)
    ordered = tuple(sorted(compared, key=lambda words: -words.lost))
    return Legibility(_answer(test, a, b, len(compared)), ordered, a, b, test, notes)


def difference_in_words(test: EquivalenceTest) -> str:
    """Return the mean difference with its 90 % interval, in percent of the letters."""
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * test.interval.point:+.1f} %{ends}"


def _unknown(unknown: dict[str, str]) -> tuple[str, ...]:
    if not unknown:
        return ()
    letters = "".join(dict.fromkeys("".join(unknown.values())))
    asking = "1 prompt asks" if len(unknown) == 1 else f"{len(unknown)} prompts ask"
    return (f"{asking} for letters that the text reader does not know: {letters[:40]}",)


def _read(
    pairs: Sequence[PairFigures], texts: dict[str, tuple[str, ...]], reader: TextReader
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
    # Words that are certainly not less legible need not be shown to be no more so.
    is_legible = test.verdict is not Equivalence.UNCLEAR or (test.interval.high or 1.0) < MARGIN
    too_close = f"{missed}, too close to the margin of {100 * MARGIN:g} %"
    return decide(
        (a > _ILLEGIBLE, ProofVerdict.LEFT_OUT, f"A's own words cannot be read: {missed}"),
        (test.verdict is Equivalence.ABOVE, ProofVerdict.FAILED, f"{missed} ({difference_in_words(test)})"),
        (is_legible, ProofVerdict.PROVEN, f"{missed}, in {count(number, 'pair')}"),
        (test.needed is None, ProofVerdict.UNCLEAR, too_close),
        (True, ProofVerdict.UNCLEAR, f"{missed}; about {test.needed} prompts with words would tell"),
    )


def find_reader(threads: int | None = None) -> TextReader | None:
    """Return the reader; None if it is not installed."""
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
    """Return the texts that a prompt asks for, in their order."""
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
