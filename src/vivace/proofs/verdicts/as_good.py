"""As good? Paired by prompt and seed, by several witnesses, each with a test of equivalence over the prompts.

The claim is proven by a witness that reads the prompt (CLIP, BLIP) and the witnesses of the image itself together. A
model alone does not notice cut steps; sharpness alone does not notice that the dog is gone. If every image is the same
as the reference's, no witness of the prompt is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import WITNESSES, ImageWitness, PairFigures
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict, decide


class Standing(StrEnum):
    """A witness's judgement of B beside A."""

    SAME = "same"
    WORSE = "worse"
    BETTER = "better"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True)
class WitnessResult:
    """The result of one witness.

    Attributes:
        a, b: mean values.
        word: a word for images that are worse or better, e.g. "softer".
        difference: in words, with its 90 % interval.
        reads_prompt: whether the witness compares the image with its prompt.
    """

    witness: str
    a: float
    b: float
    standing: Standing
    word: str
    difference: str
    margin: str
    test: EquivalenceTest
    reads_prompt: bool = False


_SIDES = {Equivalence.BELOW: "lower", Equivalence.ABOVE: "higher"}
_CAP = 1.0  # of the margin: one lost image counts as an image of something else, and no more


def witness_results(pairs: Sequence[PairFigures], limits: dict[str, float]) -> list[WitnessResult]:
    """Return the result of each witness.

    Args:
        limits: share of the reference's margin that must be kept, by the name of each model that reads prompts.
    """
    sound = [pair for pair in pairs if pair.a.alone and pair.b.alone]
    if not sound:
        return []
    listed = [_of_prompts(sound, name, limit) for name, limit in limits.items()]
    return [t for t in listed if t is not None] + [_of_images(sound, witness) for witness in WITNESSES]


def as_good(
    listed: Sequence[WitnessResult],
    *,
    is_same_picture: bool,
    is_rounding: bool,
    broken: str,
    shows_something: bool,
) -> ProofAnswer:
    """Return whether B's images are as good as A's.

    Args:
        is_same_picture: whether B was proven to draw A's images.
        is_rounding: whether every image differs by rounding alone, which needs no witness.
        broken: which images of B are broken where A's are not, in words; "" if none is.
        shows_something: False for random weights.
    """
    worse = [t for t in listed if t.standing is Standing.WORSE]
    unclear = [t for t in listed if t.standing is Standing.UNCLEAR]
    better = "".join(f"; {t.word} ({t.witness})" for t in listed if t.standing is Standing.BETTER)
    is_read = is_same_picture or any(t.reads_prompt for t in listed)
    in_words = "; ".join(f"{t.word} ({t.witness} {t.difference})" for t in worse)
    names = ", ".join(t.witness for t in listed)
    random = "images of random weights show nothing that could be good"
    unread = "the images are others, and no model is here that reads the prompts; add --scorer NAME"
    return decide(
        (broken, ProofVerdict.FAILED, f"broken images, where A's are whole: {broken}"),
        (not listed, ProofVerdict.UNCLEAR, "no pair of images to compare"),
        (worse, ProofVerdict.FAILED, in_words),
        (is_rounding, ProofVerdict.PROVEN, "every image differs by rounding at most"),
        (not shows_something, ProofVerdict.UNCLEAR, random),
        (not is_read, ProofVerdict.UNCLEAR, unread),
        (unclear, ProofVerdict.UNCLEAR, _what_decides(unclear)),
        (True, ProofVerdict.PROVEN, f"within the margin by {names}{better}"),
    )


def _what_decides(unclear: Sequence[WitnessResult]) -> str:
    names = ", ".join(t.witness for t in unclear)
    needed = [t.test.needed for t in unclear if t.test.needed is not None]
    if len(needed) < len(unclear) or not needed:
        return f"too close to the margin: {names}"
    return f"too few prompts for {names}; about {max(needed)} prompts would tell"


def _of_images(pairs: Sequence[PairFigures], witness: ImageWitness) -> WitnessResult:
    values = [(pair.a.alone[witness.name], pair.b.alone[witness.name]) for pair in pairs]
    test = equivalence(
        [witness.difference(a, b) for a, b in values], [pair.prompt for pair in pairs], witness.margin
    )
    words = {Equivalence.BELOW: witness.lower, Equivalence.ABOVE: witness.higher}
    worse = [side for side, word in words.items() if witness.worse in ("either", _SIDES[side])]
    a, b = (sum(column) / len(values) for column in zip(*values, strict=True))
    difference = _difference(test, witness.in_words)
    standing = _standing(test.verdict, worse)
    return WitnessResult(
        witness.name, a, b, standing, words.get(test.verdict, ""), difference, witness.margin_in_words, test
    )


def _of_prompts(pairs: Sequence[PairFigures], name: str, limit: float) -> WitnessResult | None:
    """Return a prompt-reading model's result; None if the reference's images do not fit their prompts either."""
    scored = [pair for pair in pairs if name in pair.a.scores and name in pair.b.scores]
    margins = [own - others for own, others in (pair.a.scores[name] for pair in scored)]
    margin = sum(margins) / len(margins) if margins else math.nan
    if not margin > 0:
        return None
    changes = [
        max(-_CAP, min(_CAP, (pair.b.scores[name][0] - pair.a.scores[name][0]) / margin)) for pair in scored
    ]
    test = equivalence(changes, [pair.prompt for pair in scored], 1 - limit)
    standing = _standing(test.verdict, [Equivalence.BELOW])
    # Images that are certainly not worse need not be shown to be no better.
    if standing is Standing.UNCLEAR and test.interval.low is not None and test.interval.low > limit - 1:
        standing = Standing.SAME
    words = {Equivalence.BELOW: "further from the prompts", Equivalence.ABOVE: "nearer to the prompts"}
    word = words.get(test.verdict, "")
    a = sum(pair.a.scores[name][0] for pair in scored) / len(scored)
    b = sum(pair.b.scores[name][0] for pair in scored) / len(scored)
    difference = f"{_difference(test, lambda share: f'{100 * share:+.1f}', ' %')} of the margin"
    margin_in_words = f"±{100 * (1 - limit):g} %"
    return WitnessResult(name, a, b, standing, word, difference, margin_in_words, test, reads_prompt=True)


def _standing(verdict: Equivalence, worse: Sequence[Equivalence]) -> Standing:
    if verdict in worse:
        return Standing.WORSE
    return {Equivalence.WITHIN: Standing.SAME, Equivalence.UNCLEAR: Standing.UNCLEAR}.get(
        verdict, Standing.BETTER
    )


def _difference(test: EquivalenceTest, in_words: Callable[[float], str], unit: str = "") -> str:
    """Return the mean difference with its 90 % interval."""
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [{in_words(low)}, {in_words(high)}]"
    return f"{in_words(test.interval.point)}{unit}{ends}"
