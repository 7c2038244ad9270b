"""As good? Paired by prompt and seed, by several witnesses, each with a test of equivalence over the prompts.

The claim is proven by a witness that reads the prompt (CLIP, BLIP) and the witnesses of the image itself together. A
model alone does not notice cut steps; sharpness alone does not notice that the dog is gone. If every image is the same
as the reference's, no witness of the prompt is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import WITNESSES, ImageWitness, PairFigures
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict


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


NOTHING = "no pair of images to compare"
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
        broken: how many images of B are broken where A's are not, in words; "" if none is.
        shows_something: False for random weights.
    """
    if broken:
        return ProofAnswer(ProofVerdict.FAILED, f"{broken}, and A's are not")
    if not listed:
        return ProofAnswer(ProofVerdict.UNCLEAR, NOTHING)
    worse = [t for t in listed if t.standing is Standing.WORSE]
    if worse:
        return ProofAnswer(
            ProofVerdict.FAILED, "; ".join(f"{t.word} ({t.witness} {t.difference})" for t in worse)
        )
    if is_rounding:
        return ProofAnswer(ProofVerdict.PROVEN, "every image differs by rounding at most")
    if not shows_something:
        return ProofAnswer(ProofVerdict.UNCLEAR, "images of random weights show nothing that could be good")
    if not is_same_picture and not any(t.reads_prompt for t in listed):
        return ProofAnswer(
            ProofVerdict.UNCLEAR,
            "the images are others, and no model is here that reads the prompts; add --scorer NAME",
        )
    unclear = [t for t in listed if t.standing is Standing.UNCLEAR]
    if unclear:
        return ProofAnswer(ProofVerdict.UNCLEAR, _what_decides(unclear))
    names = ", ".join(t.witness for t in listed)
    better = [f"{t.word} ({t.witness})" for t in listed if t.standing is Standing.BETTER]
    return ProofAnswer(
        ProofVerdict.PROVEN, f"within the margin by {names}" + (f"; {', '.join(better)}" if better else "")
    )


def _what_decides(unclear: Sequence[WitnessResult]) -> str:
    names = ", ".join(t.witness for t in unclear)
    needed = [t.test.needed for t in unclear]
    if any(number is None for number in needed):
        return f"too close to the margin: {names}"
    return f"too few prompts for {names}; about {max(n for n in needed if n is not None)} prompts would tell"


def _of_images(pairs: Sequence[PairFigures], witness: ImageWitness) -> WitnessResult:
    values = [(pair.a.alone[witness.name], pair.b.alone[witness.name]) for pair in pairs]
    test = equivalence(
        [witness.difference(a, b) for a, b in values], [pair.prompt for pair in pairs], witness.margin
    )
    standing, word = Standing.SAME, ""
    if test.verdict is Equivalence.UNCLEAR:
        standing = Standing.UNCLEAR
    elif test.verdict is not Equivalence.WITHIN:
        is_lower = test.verdict is Equivalence.BELOW
        word = witness.lower if is_lower else witness.higher
        is_worse = witness.worse in ("either", "lower" if is_lower else "higher")
        standing = Standing.WORSE if is_worse else Standing.BETTER
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [{witness.in_words(low)}, {witness.in_words(high)}]"
    a, b = (sum(column) / len(values) for column in zip(*values, strict=True))
    return WitnessResult(
        witness.name,
        a,
        b,
        standing,
        word,
        f"{witness.in_words(test.interval.point)}{ends}",
        witness.margin_in_words,
        test,
    )


def _of_prompts(pairs: Sequence[PairFigures], name: str, limit: float) -> WitnessResult | None:
    """Return a prompt-reading model's result; None if the reference's images do not fit their prompts either."""
    scored = [pair for pair in pairs if name in pair.a.scores and name in pair.b.scores]
    if not scored:
        return None
    margins = [own - others for own, others in (pair.a.scores[name] for pair in scored)]
    margin = sum(margins) / len(margins)
    if math.isnan(margin) or margin <= 0:
        return None
    changes = [
        max(-_CAP, min(_CAP, (pair.b.scores[name][0] - pair.a.scores[name][0]) / margin)) for pair in scored
    ]
    test = equivalence(changes, [pair.prompt for pair in scored], 1 - limit)
    standing, word = {
        Equivalence.WITHIN: (Standing.SAME, ""),
        Equivalence.BELOW: (Standing.WORSE, "further from the prompts"),
        Equivalence.ABOVE: (Standing.BETTER, "nearer to the prompts"),
        Equivalence.UNCLEAR: (Standing.UNCLEAR, ""),
    }[test.verdict]
    # Images that are certainly not worse need not be shown to be no better.
    if (
        test.verdict is Equivalence.UNCLEAR
        and test.interval.low is not None
        and test.interval.low > limit - 1
    ):
        standing = Standing.SAME
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    a, b = (
        sum(image.scores[name][0] for image in images) / len(images)
        for images in ([pair.a for pair in scored], [pair.b for pair in scored])
    )
    return WitnessResult(
        name,
        a,
        b,
        standing,
        word,
        f"{100 * test.interval.point:+.1f} %{ends} of the margin",
        f"±{100 * (1 - limit):g} %",
        test,
        reads_prompt=True,
    )
