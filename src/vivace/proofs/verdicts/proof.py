"""The result of a proof: every figure, the verdicts, and the exit code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vivace.answers.formatting import count
from vivace.benchmark.load_testing.load_answer import as_dict
from vivace.foundation.stats import EquivalenceTest
from vivace.proofs.checks.findings import ImageFinding
from vivace.proofs.checks.pair_figures import AGAINST, Nearness, PairFigures, ReadImage
from vivace.proofs.checks.request_checks import ServerCheck
from vivace.proofs.verdicts.as_good import Standing, WitnessResult, witness_results
from vivace.proofs.verdicts.fast import SpeedAnswer
from vivace.proofs.verdicts.legible import Legibility
from vivace.proofs.verdicts.same import OwnDistances, means, worst_pairs
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict

Claim = Literal["same", "as-good", "legible", "honest", "fast"]
_QUESTIONS: dict[Claim, str] = {
    "same": "Same image?",
    "as-good": "As good?",
    "legible": "Legible?",
    "honest": "Honest?",
    "fast": "Fast?",
}
METRICS = {"psnr_db": (0.0, 100.0), "ssim": (-1.0, 1.0), "match": (-1.0, 1.0), "lpips": (0.0, 10.0)}
"""The metrics whose mean may be limited, and the range of each limit."""
PROVEN, FAILED, CANNOT_TELL = 0, 1, 4


# An attention kernel, a tile of a decoder or a table of positions may be wrong for one aspect ratio and right for
# others.
@dataclass(frozen=True)
class SizeFigures:
    """The mean metrics of B's images of one size against A's."""

    size: str
    num_pairs: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """An image that a side did not draw, or that cannot be read."""

    side: Literal["A", "B"]
    what: str
    reason: str
    request: str = ""


@dataclass(frozen=True)
class FailUnder:
    """A limit on the mean of a metric, and the value that was reached."""

    metric: str
    limit: float
    reached: float | None

    @property
    def verdict(self) -> ProofVerdict:
        if self.reached is None:
            return ProofVerdict.UNCLEAR
        is_kept = self.reached <= self.limit if self.metric == "lpips" else self.reached >= self.limit
        return ProofVerdict.PROVEN if is_kept else ProofVerdict.FAILED

    @property
    def text(self) -> str:
        reached = "not measured" if self.reached is None else f"{self.reached:.4g}"
        return f"mean {self.metric} {reached}, {'at most' if self.metric == 'lpips' else 'at least'} {self.limit:g}"


@dataclass(frozen=True)
class Proof:
    """The result of `prove`.

    Attributes:
        a, b: both sides as they were written; A is the reference.
        claims: those that decide the exit code.
        same, good, legibility, honest, speed: the verdicts.
        settings: how the images of each side were drawn, by its letter, where all its images say the same.
        requested_sizes: of --sizes.
        sizes: figures by size, the worst first; empty if all images have the same size.
        findings: faults of B's images as a set.
        notes: remarks, e.g. that a server was busy.
    """

    a: str
    b: str
    claims: tuple[Claim, ...]
    settings: dict[str, dict[str, Any]]
    requested_sizes: tuple[str, ...]
    sizes: tuple[SizeFigures, ...]
    num_seeds: int
    num_prompts: int
    knows_prompts: bool
    pairs: tuple[PairFigures, ...]
    own: OwnDistances
    witness_results: tuple[WitnessResult, ...]
    checks: tuple[ServerCheck, ...]
    findings: tuple[ImageFinding, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    same: ProofAnswer
    good: ProofAnswer
    legibility: Legibility
    honest: ProofAnswer
    speed: SpeedAnswer
    fail_under: tuple[FailUnder, ...] = ()

    @property
    def answers(self) -> dict[str, ProofAnswer]:
        """The answers by question."""
        return {_QUESTIONS[claim]: answer for claim, answer in self.by_claim.items()}

    @property
    def by_claim(self) -> dict[Claim, ProofAnswer]:
        """The answers by claim."""
        return {
            "same": self.same,
            "as-good": self.good,
            "legible": self.legibility.answer,
            "honest": self.honest,
            "fast": self.speed.answer,
        }

    @property
    def verdict(self) -> ProofVerdict:
        """The verdict on the claims together."""
        verdicts = [self.by_claim[claim].verdict for claim in self.claims]
        verdicts += [limit.verdict for limit in self.fail_under]
        if ProofVerdict.FAILED in verdicts:
            return ProofVerdict.FAILED
        return ProofVerdict.PROVEN if set(verdicts) == {ProofVerdict.PROVEN} else ProofVerdict.UNCLEAR

    @property
    def exit_code(self) -> int:
        """0 if the claims are proven, 1 if one failed, 4 if that is undecided or images are missing."""
        if self.verdict is ProofVerdict.FAILED:
            return FAILED
        return PROVEN if self.verdict is ProofVerdict.PROVEN and not self.failures else CANNOT_TELL

    @property
    def shared_settings(self) -> dict[str, Any]:
        """How the images of both sides were drawn, where they say the same."""
        of_a, of_b = self.settings["a"], self.settings["b"]
        return {name: value for name, value in of_a.items() if of_b.get(name) == value}

    @property
    def why(self) -> str:
        """Why B's images differ, if A draws them so; "" if none is far from A's."""
        if not worst_pairs(self.pairs):
            return ""
        return next((finding.summary for finding in self.findings if finding.is_cause), "cannot say why")

    @property
    def headline(self) -> str:
        """The verdict as a sentence, without the names of both sides."""
        if self.same.verdict is ProofVerdict.PROVEN and self.good.verdict is not ProofVerdict.FAILED:
            is_exact = all(pair.nearness is Nearness.ITSELF for pair in self.pairs if pair.against)
            text = f"B draws {'' if is_exact and not self.findings else 'nearly '}the same images as A"
        elif self.good.verdict is not ProofVerdict.FAILED and "same" in self.claims and self.why:
            text = f"B differs from A: {self.why}"
        elif self.good.verdict is ProofVerdict.PROVEN:
            text = "B is as good as A; its images are others"
        elif self.good.verdict is ProofVerdict.FAILED:
            text = f"B is worse than A: {self.good.reason}"
        elif self.legibility.answer.verdict is ProofVerdict.FAILED:
            return f"B's words are less legible than A's: {self.legibility.answer.reason}{self._added}"
        elif self.honest.verdict is ProofVerdict.FAILED:
            return f"B does not do what it is asked for: {self.honest.reason}{self._added_besides}"
        else:
            text = f"Cannot tell whether B is as good as A: {self.good.reason}"
        if self.legibility.answer.verdict is ProofVerdict.FAILED:
            text += f"; its words are less legible: {self.legibility.answer.reason}"
        return text + self._added

    @property
    def _added(self) -> str:
        """The headline's additions to the answer about the images."""
        is_praise = ProofVerdict.FAILED not in (self.good.verdict, self.legibility.answer.verdict)
        joint = ", but" if is_praise and self.good.verdict is ProofVerdict.PROVEN else ";"
        text = f"{joint} {self.honest.reason}" if self.honest.verdict is ProofVerdict.FAILED else ""
        return text + self._added_besides

    @property
    def _added_besides(self) -> str:
        text = ""
        if "fast" in self.claims and self.speed.answer.verdict is not ProofVerdict.LEFT_OUT:
            text += f"; {self.speed.answer.reason}"
        if self.failures:
            text += f"; {count(len(self.failures), 'image')} could not be compared"
        return text

    def __str__(self) -> str:
        from vivace.answers.terminal import text_of
        from vivace.proofs.verdicts.proof_answer import answer_of

        return text_of(answer_of(self)).rstrip()

    def page(self, command: str = "") -> str:
        """Return the result as HTML, with images, in one file that needs no network.

        Args:
            command: the command that repeats it; "" to leave it out.
        """
        from vivace.answers.page import page_of
        from vivace.proofs.verdicts.proof_answer import answer_of

        return page_of(answer_of(self, command))

    def _repr_html_(self) -> str:
        """Return the page for notebooks."""
        from vivace.answers.page import in_notebook

        return in_notebook(self.page())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; equal images have a PSNR of null and `identical`."""
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict.value,
            "headline": self.headline,
            "claims": list(self.claims),
            "settings": self.shared_settings,
            "settings_a": self.settings["a"],
            "settings_b": self.settings["b"],
            "sizes": list(self.requested_sizes),
            "answers": {
                claim: {"verdict": answer.verdict.value, "reason": answer.reason}
                for claim, answer in self.by_claim.items()
            },
            "fail_under": [
                {"metric": f.metric, "limit": f.limit, "mean": _finite(f.reached), "verdict": f.verdict.value}
                for f in self.fail_under
            ],
            "distances": {
                "b_to_a": _metrics(means([p.against for p in self.pairs if p.against])),
                "b_to_a_by_size": {size.size: _metrics(size.metrics) for size in self.sizes},
                "a_to_itself": _metrics(means(self.own.repeats)),
                "a_to_another_seed": _metrics(means(self.own.other_seeds)),
            },
            "witnesses": [_witness_result(t) for t in self.witness_results],
            "speed": _speed(self.speed),
            "words": _words(self.legibility),
            "checks": [
                {"name": c.name, "status": c.status.value, "reason": c.reason, "request": c.request}
                for c in self.checks
            ],
            "findings": [{"text": f.text, "request": f.request} for f in self.findings],
            "why": self.why,
            "worst": [
                {"prompt": p.prompt, "seed": p.seed, "match": p.against["match"], "request": p.request}
                for p in worst_pairs(self.pairs)
            ],
            "failures": [
                {"side": f.side, "what": f.what, "reason": f.reason, "request": f.request}
                for f in self.failures
            ],
            "notes": list(self.notes),
            "pairs": [_pair(pair) for pair in self.pairs],
            "exit_code": self.exit_code,
        }


def _pair(pair: PairFigures) -> dict[str, Any]:
    return {
        "prompt": pair.prompt,
        "seed": pair.seed,
        "size": None if pair.a.size is None else list(pair.a.size),
        "a": _image(pair.a),
        "b": _image(pair.b),
        "against": _metrics(pair.against),
        "has_hole": pair.has_hole,
        "nearness": pair.nearness,
        "reason": pair.reason,
    }


def _image(image: ReadImage) -> dict[str, Any]:
    about = {"sha256": image.kept.sha256, "seconds": image.kept.seconds}
    return about | {"faults": list(image.faults), "reason": image.reason} | image.alone


def _witness_result(t: WitnessResult) -> dict[str, Any]:
    figures = {"a": _finite(t.a), "b": _finite(t.b), "standing": t.standing.value, "word": t.word}
    return {"witness": t.witness} | figures | _test(t.test)


def _test(test: EquivalenceTest) -> dict[str, Any]:
    interval = test.interval
    return {
        "difference": interval.point,
        "interval90": None if interval.low is None else [interval.low, interval.high],
        "margin": test.margin,
        "prompts": test.num_groups,
        "prompts_needed": test.needed,
    }


def _words(legibility: Legibility) -> dict[str, Any] | None:
    if legibility.test is None:
        return None
    return {
        "a_missed": legibility.a,
        "b_missed": legibility.b,
        **_test(legibility.test),
        "pairs": [
            {
                "prompt": words.pair.prompt,
                "seed": words.pair.seed,
                "texts": list(words.texts),
                "a": {"read": words.a.read, "missed": words.a.missed},
                "b": {"read": words.b.read, "missed": words.b.missed},
            }
            for words in legibility.pairs
        ],
    }


def _metrics(metrics: dict[str, float]) -> dict[str, Any]:
    values: dict[str, Any] = {name: _finite(metrics[name]) for name in AGAINST if name in metrics}
    return values | ({"identical": True} if math.isinf(metrics.get("psnr_db", 0.0)) else {})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def figures_by_size(pairs: Sequence[PairFigures]) -> tuple[SizeFigures, ...]:
    """Return the figures of each size, the worst first; empty if all images have the same size."""
    groups = _by_size([pair for pair in pairs if pair.against])
    if len(groups) < 2:
        return ()
    figures = [
        SizeFigures(size, len(part), means([p.against for p in part])) for size, part in groups.items()
    ]
    return tuple(sorted(figures, key=lambda each: each.metrics["match"]))


def with_worst_size(same: ProofAnswer, sizes: Sequence[SizeFigures]) -> ProofAnswer:
    """Return the answer to "Same image?" with the name of the size at which images differ most."""
    if not sizes or sizes[0].metrics["match"] == sizes[-1].metrics["match"]:
        return same
    worst = f"the worst size is {sizes[0].size} (mean match {sizes[0].metrics['match']:.3f})"
    return replace(same, reason=f"{same.reason}; {worst}")


def worse_at_a_size(pairs: Sequence[PairFigures], limits: dict[str, float]) -> list[WitnessResult]:
    """Return what witnesses call worse at some sizes only."""
    groups = _by_size([pair for pair in pairs if pair.is_complete])
    if len(groups) < 2:
        return []
    worse = [
        (size, result)
        for size, part in groups.items()
        for result in witness_results(part, limits)
        if result.standing is Standing.WORSE
    ]
    times = Counter(result.witness for _, result in worse)
    return [
        replace(result, witness=f"{result.witness} at {size}")
        for size, result in worse
        if times[result.witness] < len(groups)
    ]


def _by_size(pairs: Sequence[PairFigures]) -> dict[str, list[PairFigures]]:
    groups: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        groups.setdefault(pair.size or "{}x{}".format(*(pair.a.size or (0, 0))), []).append(pair)
    return groups


def _speed(speed: SpeedAnswer) -> dict[str, Any]:
    test = speed.test
    return {
        "a_median_s": speed.a_s,
        "b_median_s": speed.b_s,
        "pairs": speed.num_pairs,
        "log_ratio": _interval(test),
        "log_ratio_to_a_again": _interval(speed.after),
        "margin": None if test is None else test.margin,
        "prompts_needed": None if test is None else test.needed,
        "loads": [
            {"side": load.side} | ({"reason": load.reason} if load.row is None else as_dict(load.row))
            for load in speed.loads
        ],
    }


def _interval(test: EquivalenceTest | None) -> dict[str, Any] | None:
    if test is None:
        return None
    low, high = test.interval.low, test.interval.high
    return {"mean": test.interval.point, "interval90": None if low is None else [low, high]}
