"""The result of a proof: every figure, the verdicts, the exit code; and its answer, as each writer shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from vivace.answers.answer import (
    Answer,
    Cell,
    CiCase,
    Fact,
    Facts,
    ImageCell,
    ImageGrid,
    ImageRow,
    Look,
    Section,
    Table,
)
from vivace.answers.formatting import count
from vivace.benchmark.load_testing.load_answer import as_dict, errors_text, figure_text
from vivace.benchmark.load_testing.load_rows import figures_of
from vivace.foundation.stats import EquivalenceTest
from vivace.proofs.checks.pair_figures import AGAINST, ImageFinding, Nearness, PairFigures, ReadImage
from vivace.proofs.checks.request_checks import ServerCheck, Status
from vivace.proofs.verdicts.as_good import SizeFigures, Standing, WitnessResult
from vivace.proofs.verdicts.fast import SideLoad, SpeedAnswer
from vivace.proofs.verdicts.legible import ImageText, Legibility
from vivace.proofs.verdicts.same import Metrics, OwnDistances, ProofAnswer, ProofVerdict, means, worst_pairs

if TYPE_CHECKING:
    from PIL.Image import Image

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
_LOOKS: dict[str, Look] = {
    ProofVerdict.PROVEN: "good",
    ProofVerdict.FAILED: "bad",
    Status.PASSED: "good",
    Status.FAILED: "bad",
    Standing.SAME: "good",
    Standing.BETTER: "good",
    Standing.WORSE: "bad",
}
_METRIC_NAMES = {"psnr_db": "PSNR, dB", "ssim": "SSIM", "match": "match", "lpips": "LPIPS"}
_PAIRED = ("A", "B", "B beside A [90 % interval]", "margin", "verdict")
MAX_ROWS = 12
_MOST_WORDS = 6
_LONGEST = 200  # letters of what was read


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
    def by_claim(self) -> dict[Claim, ProofAnswer]:
        return {
            "same": self.same,
            "as-good": self.good,
            "legible": self.legibility.answer,
            "honest": self.honest,
            "fast": self.speed.answer,
        }

    @property
    def answers(self) -> dict[str, ProofAnswer]:
        """The answers by question."""
        return {_QUESTIONS[claim]: answer for claim, answer in self.by_claim.items()}

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
        good, honest, legible = self.good.verdict, self.honest, self.legibility.answer
        failed = [answer for answer in (legible, honest) if answer.verdict is ProofVerdict.FAILED]
        joint = ", but" if good is ProofVerdict.PROVEN and legible not in failed else ";"
        if self.same.verdict is ProofVerdict.PROVEN and good is not ProofVerdict.FAILED:
            is_exact = all(pair.nearness is Nearness.ITSELF for pair in self.pairs if pair.against)
            text = f"B draws {'' if is_exact and not self.findings else 'nearly '}the same images as A"
        elif good is not ProofVerdict.FAILED and "same" in self.claims and self.why:
            text = f"B differs from A: {self.why}"
        elif good is ProofVerdict.PROVEN:
            text = "B is as good as A; its images are others"
        elif good is ProofVerdict.FAILED:
            text = f"B is worse than A: {self.good.reason}"
        elif failed and failed[0] is legible:
            text = f"B's words are less legible than A's: {failed.pop(0).reason}"
        elif failed:
            text = f"B does not do what it is asked for: {failed.pop(0).reason}"
        else:
            text = f"Cannot tell whether B is as good as A: {self.good.reason}"
        if legible in failed:
            text += f"; its words are less legible: {legible.reason}"
        if honest in failed:
            text += f"{joint} {honest.reason}"
        if "fast" in self.claims and self.speed.answer.verdict is not ProofVerdict.LEFT_OUT:
            text += f"; {self.speed.answer.reason}"
        if self.failures:
            text += f"; {count(len(self.failures), 'image')} could not be compared"
        return text

    @property
    def description(self) -> str:
        """The images, e.g. "13 prompts × 3 seeds, 512 × 512 px, 20 steps, guidance 7.5"."""
        if not self.knows_prompts:
            return f"{count(len(self.pairs), 'pair')} of images, paired by name"
        shared = self.shared_settings
        text = f"{count(self.num_prompts, 'prompt')} × {count(self.num_seeds, 'seed')}"
        if self.requested_sizes:
            text += f" × {count(len(self.requested_sizes), 'size')} ({', '.join(self.requested_sizes)})"
        parts = [", ".join([text, *_in_words(shared)])]
        for letter, settings in self.settings.items():
            own = {name: value for name, value in settings.items() if name not in shared}
            parts += [f"{letter.upper()}: {', '.join(_in_words(own))}"] if own else []
        return "; ".join(parts)

    @property
    def distances(self) -> list[tuple[str, int, Metrics]]:
        """The distances of B's images to A's, and A's own: the kind, the number of pairs, and mean metrics."""
        compared = [pair.against for pair in self.pairs if pair.against]
        rows = [
            ("B against A", len(compared), means(compared)),
            *((f"at {size.size}", size.num_pairs, size.metrics) for size in self.sizes),
            ("A against itself", len(self.own.repeats), means(self.own.repeats)),
            ("A against another seed", len(self.own.other_seeds), means(self.own.other_seeds)),
        ]
        return [row for row in rows if row[1]]

    def __str__(self) -> str:
        from vivace.answers.terminal import text_of

        return text_of(answer_of(self)).rstrip()

    def page(self, command: str = "") -> str:
        """Return the result as HTML, with images, in one file that needs no network.

        Args:
            command: the command that repeats it; "" to leave it out.
        """
        from vivace.answers.page import page_of

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
            "witnesses": [
                {"witness": t.witness, "a": _finite(t.a), "b": _finite(t.b)}
                | {"standing": t.standing.value, "word": t.word}
                | _test(t.test)
                for t in self.witness_results
            ],
            "speed": _speed(self.speed),
            "words": _words(self.legibility),
            "checks": [asdict(check) | {"status": check.status.value} for check in self.checks],
            "findings": [{"text": f.text, "request": f.request} for f in self.findings],
            "why": self.why,
            "worst": [
                {"prompt": p.prompt, "seed": p.seed, "match": p.against["match"], "request": p.request}
                for p in worst_pairs(self.pairs)
            ],
            "failures": [asdict(failure) for failure in self.failures],
            "notes": list(self.notes),
            "pairs": [_pair(pair) for pair in self.pairs],
            "exit_code": self.exit_code,
        }


def _pair(pair: PairFigures) -> dict[str, Any]:
    def image(image: ReadImage) -> dict[str, Any]:
        about = {"sha256": image.kept.sha256, "seconds": image.kept.seconds}
        return about | {"faults": list(image.faults), "reason": image.reason} | image.alone

    return {
        "prompt": pair.prompt,
        "seed": pair.seed,
        "size": None if pair.a.size is None else list(pair.a.size),
        "a": image(pair.a),
        "b": image(pair.b),
        "against": _metrics(pair.against),
        "has_hole": pair.has_hole,
        "nearness": pair.nearness,
        "reason": pair.reason,
    }


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
    pairs = [
        {"prompt": words.pair.prompt, "seed": words.pair.seed, "texts": list(words.texts)}
        | {"a": asdict(words.a), "b": asdict(words.b)}
        for words in legibility.pairs
    ]
    return {"a_missed": legibility.a, "b_missed": legibility.b} | _test(legibility.test) | {"pairs": pairs}


def _metrics(metrics: Metrics) -> dict[str, Any]:
    values: dict[str, Any] = {name: _finite(metrics[name]) for name in AGAINST if name in metrics}
    return values | ({"identical": True} if math.isinf(metrics.get("psnr_db", 0.0)) else {})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _speed(speed: SpeedAnswer) -> dict[str, Any]:
    def interval(test: EquivalenceTest | None) -> dict[str, Any] | None:
        figures = {} if test is None else _test(test)
        return {"mean": figures["difference"], "interval90": figures["interval90"]} if figures else None

    return {
        "a_median_s": speed.a_s,
        "b_median_s": speed.b_s,
        "pairs": speed.num_pairs,
        "log_ratio": interval(speed.test),
        "log_ratio_to_a_again": interval(speed.after),
        "margin": None if speed.test is None else speed.test.margin,
        "prompts_needed": None if speed.test is None else speed.test.needed,
        "loads": [
            {"side": load.side} | ({"reason": load.reason} if load.row is None else as_dict(load.row))
            for load in speed.loads
        ],
    }


def answer_of(proof: Proof, command: str = "") -> Answer:
    return Answer(
        command="prove",
        headline=f"{proof.headline}.",
        data=proof.to_dict(),
        verdict=proof.verdict.value,
        about=(f"A = {proof.a} (the reference)", f"B = {proof.b}", proof.description),
        facts=Facts(tuple(_questions(proof)), are_tiles=True),
        sections=(
            *_checks(proof),
            Section("Images", (images_of(proof),), where="page"),
            Section("Same image?", (_distances(proof), Facts(tuple(_worst(proof)), _why(proof)))),
            Section("As good?", (_witnesses(proof),)),
            Section("Legible?", (Facts(tuple(_legible(proof.legibility))),)),
            Section("Fast?", (_loads(proof.speed.loads),)),
            Section(
                "Not compared",
                (Facts(tuple(Fact(f.side, f.what, f.reason, "bad", f.request) for f in proof.failures)),),
            ),
        ),
        notes=proof.notes,
        reproduce=command,
        cases=tuple(_cases(proof)),
    )


def _cases(proof: Proof) -> Iterator[CiCase]:
    """Yield what a CI job counts: the questions, the limits, the checks of B, and images that are missing."""
    for claim, answer in proof.by_claim.items():
        is_claimed = claim in proof.claims
        yield CiCase(
            _QUESTIONS[claim], _outcome(answer.verdict, is_claimed), f"{answer.word}: {answer.reason}"
        )
    for limit in proof.fail_under:
        yield CiCase(f"--fail-under {limit.metric}", _outcome(limit.verdict, True), limit.text)
    is_claimed = "honest" in proof.claims
    for check in proof.checks:
        outcome = _outcome(check.status, is_claimed and check.status is not Status.UNCLEAR)
        yield CiCase(f"Honest? {check.name}", outcome, check.reason, check.request)
    for failure in proof.failures:
        yield CiCase(f"{failure.side}: {failure.what}", "error", failure.reason, failure.request)


def _outcome(
    verdict: ProofVerdict | Status, is_claimed: bool
) -> Literal["passed", "failure", "error", "skipped"]:
    look = _LOOKS.get(verdict)
    if look == "good":
        return "passed"
    return "skipped" if not is_claimed else "failure" if look == "bad" else "error"


def _in_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings, e.g. "20 steps"."""
    if "width" in settings and "height" in settings:
        yield f"{settings['width']} × {settings['height']} px"
    if "num_inference_steps" in settings:
        yield count(settings["num_inference_steps"], "step")
    if "guidance_scale" in settings:
        yield f"guidance {settings['guidance_scale']:g}"
    if "scheduler" in settings:
        yield settings["scheduler"]


def _questions(proof: Proof) -> Iterator[Fact]:
    for claim, answer in proof.by_claim.items():
        # A different or slower image is not a fault by itself.
        is_open = claim in ("same", "fast") and claim not in proof.claims
        look = "open" if is_open and answer.verdict is ProofVerdict.FAILED else _look(answer.verdict)
        yield Fact(_QUESTIONS[claim], answer.word, answer.reason, look)
    for limit in proof.fail_under:
        yield Fact(f"--fail-under {limit.metric}", limit.verdict.value, limit.text, _look(limit.verdict))
    yield Fact("claimed", f"{', '.join(proof.claims)}: {proof.verdict.value}", look=_look(proof.verdict))


def _look(verdict: str) -> Look:
    return _LOOKS.get(verdict, "open")


def _checks(proof: Proof) -> Iterator[Section]:
    """Yield findings and checks, those that passed by themselves."""
    facts = [Fact("finding", finding.text, look="bad", request=finding.request) for finding in proof.findings]
    checks = {
        status: [
            Fact(status.value, check.name, check.reason, _look(status), check.request)
            for check in proof.checks
            if check.status is status
        ]
        for status in Status
    }
    facts += [*checks[Status.FAILED], *checks[Status.UNCLEAR]]
    yield Section("Honest?", (Facts(tuple(facts), "Whether B does what it is asked for." if facts else ""),))
    passed = checks[Status.PASSED]
    yield Section(f"{count(len(passed), 'check')} of B passed", (Facts(tuple(passed)),), is_folded=True)


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return "equal" if math.isinf(value) else f"{value:.1f}" if name == "psnr_db" else f"{value:.3f}"


def _distances(proof: Proof) -> Table:
    rows = proof.distances
    names = [name for name in _METRIC_NAMES if any(name in values for _, _, values in rows)]
    levels = [pair.nearness for pair in proof.pairs if pair.against]
    counts = ", ".join(f"{levels.count(level)} {level.value}" for level in Nearness if level in levels)
    note = (
        "PSNR and SSIM average over the image; match is the share of A’s contrast that B reproduces: 1 for the same "
        "image, 0 and less for another one. Equal images have no PSNR; its mean is that of the others."
    )
    return Table.of(
        ("distances, means", "pairs", *(_METRIC_NAMES[name] for name in names)),
        [(what, str(number), *(_metric(n, values.get(n)) for n in names)) for what, number, values in rows],
        note=f"{counts}.\n{note}" if counts else "",
    )


def _why(proof: Proof) -> str:
    return f"B's images differ: {proof.why}. The worst:" if proof.why else ""


def _worst(proof: Proof) -> Iterator[Fact]:
    for pair in worst_pairs(proof.pairs):
        figures = f"match {pair.against['match']:.2f}, PSNR {pair.against['psnr_db']:.1f} dB"
        yield Fact("", pair.label, figures, request=pair.request)


def _witnesses(proof: Proof) -> Table:
    def row(t: WitnessResult) -> tuple[str | Cell, ...]:
        needed = f"about {t.test.needed} prompts would tell" if t.test.needed else ""
        note = ", ".join(part for part in (t.word, needed) if part)
        text = f"{t.standing.value} ({note})" if note else t.standing.value
        verdict = Cell(text, t.standing.value, note, look=_look(t.standing))
        return (t.witness, f"{t.a:.4g}", f"{t.b:.4g}", t.difference, t.margin, verdict)

    note = (
        "Each witness is asked of every pair; the interval is over prompts. It says same if the whole 90 % interval is "
        "within the margin, and worse only if the mean is surely beyond it."
    )
    rows = [row(result) for result in proof.witness_results]
    return Table.of(("witness", *_PAIRED), rows, texts=_PAIRED[2:], note=note)


def _legible(legibility: Legibility) -> Iterator[Fact]:
    for words in [words for words in legibility.pairs if words.lost > 0][:_MOST_WORDS]:
        yield Fact(words.label, f"A {_read(words.a)}; B {_read(words.b)}")


def _read(text: ImageText) -> str:
    """Return the text read in an image, e.g. “OPFN”, 25 % missed."""
    read = " ".join(text.read.split())
    if not read:
        return "nothing is read"
    shortened = read if len(read) <= _LONGEST else f"{read[:_LONGEST]}…"
    return f"“{shortened}”, {100 * text.missed:.0f} % missed"


def _loads(loads: Sequence[SideLoad]) -> Table:
    slos = sorted({round(slo, 3) for load in loads if load.row is not None for slo in load.row.slo_s})
    headings = ("under load", "requests", "images/s", "p50, s", "p95, s", "in time", "goodput/s", "errors")
    note = f"In time within {' or '.join(f'{slo:g} s' for slo in slos)}." if slos else ""
    return Table.of(headings, [_load(load) for load in loads], texts=("errors",), note=note)


def _load(load: SideLoad) -> tuple[str, ...]:
    row = load.row
    if row is None:
        return (f"{load.side}: no load was measured: {load.reason}", *("–",) * 7)
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    figures = figures_of(row)
    values = (figures.throughput, *(figures.latency_s.get(p) for p in (50, 95)))
    return (
        f"{load.side}, {row.stage.name}{rate}",
        str(figures.num_requests),
        *(figure_text([value]) or "–" for value in values),
        figure_text([figures.within_slo], percent=True) or "–",
        figure_text([figures.goodput]) or "–",
        errors_text(figures.errors),
    )


def images_of(proof: Proof) -> ImageGrid:
    def order(pair: PairFigures) -> tuple[int, float]:
        if pair.is_broken:
            return 0, 0.0
        return (2, pair.against["match"]) if pair.against else (1, 0.0)

    pairs, total = sorted(proof.pairs, key=order)[:MAX_ROWS], len(proof.pairs)
    about = "The worst first." if len(pairs) == total else f"The worst {len(pairs)} of {total}."
    by = "prompt and seed" if proof.knows_prompts else "name"
    why = f" B’s images differ: {proof.why}." if proof.why else ""
    return ImageGrid(
        ("A", "B"),
        tuple(_row(n, pair, proof) for n, pair in enumerate(pairs)),
        _reader(pairs),
        f"Of the same {by}. {about}{why}",
        has_reference=True,
        shows_difference=True,
    )


def _reader(pairs: Sequence[PairFigures]) -> Callable[[str], Image | str]:
    def read(key: str) -> Image | str:
        number, _, side = key.partition(" ")
        image = pairs[int(number)].image("a" if side == "a" else "b")
        picture: Image | str = image.picture if image.is_there else image.reason
        return picture

    return read


def _row(number: int, pair: PairFigures, proof: Proof) -> ImageRow:
    if pair.nearness is None:
        caption = pair.reason or "not compared"
    elif math.isinf(pair.against["psnr_db"]):
        caption = "every pixel is equal"
    else:
        figures = [
            f"{name} {_metric(key, pair.against[key])}"
            for key, name in _METRIC_NAMES.items()
            if key in pair.against
        ]
        caption = ", ".join([pair.nearness.value, *figures])
    caption += ", with a hole" if pair.has_hole else ""
    is_bad = bool(pair.b.faults or pair.has_hole) or pair.nearness in (None, Nearness.ANOTHER)
    cells = tuple(
        ImageCell(f"{number} {side}", ", ".join(image.faults))
        for side, image in (("a", pair.a), ("b", pair.b))
    )
    seed = pair.seed_in_words if proof.knows_prompts else ""
    return ImageRow(pair.prompt, seed, cells, (), caption, "bad" if is_bad else "", pair.request)
