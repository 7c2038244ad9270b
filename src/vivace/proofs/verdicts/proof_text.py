"""A proof as text, 100 columns wide."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vivace.benchmark.load_testing.load_report import as_dict, errors_text, figure_text, figures_of
from vivace.benchmark.load_testing.load_rows import LoadRow
from vivace.foundation.stats import EquivalenceTest
from vivace.foundation.untrusted.streams import plain
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.verdicts.fast import SpeedAnswer, ratio_in_words, seconds_in_words
from vivace.proofs.verdicts.legible import ImageText, Legibility, WordsPair, difference_in_words
from vivace.proofs.verdicts.same import means, worst_pairs
from vivace.report.value_text import count

if TYPE_CHECKING:
    from vivace.proofs.verdicts.proof import Proof

WIDTH = 100
_MOST = 12
"""Number of failures that are listed; the others are counted."""
_MAX_LINES = 6
_LONGEST = 200  # letters of what was read


def lines(proof: Proof) -> Iterator[str]:
    """Yield the lines of the answer."""
    yield from _wrapped(f"A = {proof.a} (the reference)")
    yield from _wrapped(f"B = {proof.b}")
    yield from _wrapped(described(proof))
    yield ""
    for question, answer in proof.answers.items():
        yield from _wrapped(f"{question:14} {answer.word}: {answer.reason}", indent=" " * 15)
    for limit in proof.fail_under:
        yield from _wrapped(f"{'--fail-under':14} {limit.verdict.value}: {limit.text}", indent=" " * 15)
    yield from _distances(proof)
    yield from _witnesses(proof)
    yield from _words(proof.legibility)
    yield from _speed(proof.speed)
    yield from _checks(proof)
    yield from _failures(proof)
    if proof.notes:
        yield ""
    for note in proof.notes:
        yield from _wrapped(f"note: {note}", indent="  ")
    yield ""
    yield from _wrapped(f"{', '.join(proof.claims)}: {proof.verdict.value}. {proof.headline}")


def described(proof: Proof) -> str:
    """Return a description of the images, e.g. "13 prompts × 3 seeds, 512 × 512 px, 20 steps, guidance 7.5"."""
    if not proof.knows_prompts:
        return f"{count(len(proof.pairs), 'pair')} of images, paired by name"
    shared = proof.shared_settings
    text = f"{count(proof.num_prompts, 'prompt')} × {count(proof.num_seeds, 'seed')}"
    if proof.requested_sizes:
        text += f" × {count(len(proof.requested_sizes), 'size')} ({', '.join(proof.requested_sizes)})"
    parts = [", ".join([text, *_in_words(shared)])]
    for letter, settings in proof.settings.items():
        own = {name: value for name, value in settings.items() if name not in shared}
        parts += [f"{letter.upper()}: {', '.join(_in_words(own))}"] if own else []
    return "; ".join(parts)


def _in_words(settings: dict[str, Any]) -> Iterator[str]:
    """Yield settings, e.g. "20 steps"."""
    if "width" in settings and "height" in settings:
        yield f"{settings['width']} × {settings['height']} px"
    if "num_inference_steps" in settings:
        yield count(settings["num_inference_steps"], "step")
    if "guidance_scale" in settings:
        yield f"guidance {settings['guidance_scale']:g}"
    if "scheduler" in settings:
        yield settings["scheduler"]


def distance_rows(proof: Proof) -> list[tuple[str, int, dict[str, float]]]:
    """Return the distances of B's images to A's, and A's own: the kind, the number of pairs, and mean metrics."""
    compared = [pair.against for pair in proof.pairs if pair.against]
    rows = [
        ("B against A", len(compared), means(compared)),
        *((f"at {size.size}", size.num_pairs, size.metrics) for size in proof.sizes),
        ("A against itself", len(proof.own.repeats), means(proof.own.repeats)),
        ("A against another seed", len(proof.own.other_seeds), means(proof.own.other_seeds)),
    ]
    return [row for row in rows if row[1]]


def metric(name: str, value: float | None) -> str:
    """Return a metric as printed."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "equal"
    return f"{value:.1f}" if name == "psnr_db" else f"{value:.3f}"


def _distances(proof: Proof) -> Iterator[str]:
    rows = distance_rows(proof)
    if not rows:
        return
    has_lpips = any("lpips" in values for _, _, values in rows)
    names = ["psnr_db", "ssim", "match", *(["lpips"] if has_lpips else [])]
    yield ""
    yield f"{'distances, means':26}{'pairs':>6}" + "".join(f"{name:>10}" for name in names)
    for what, number, values in rows:
        yield f"  {what:24}{number:>6}" + "".join(f"{metric(n, values.get(n)):>10}" for n in names)


def _witnesses(proof: Proof) -> Iterator[str]:
    if not proof.witness_results:
        return
    yield ""
    wide = max(12, *(len(t.witness) + 1 for t in proof.witness_results))
    yield f"{'witnesses':{wide + 2}}{'A':>9}{'B':>9}   {'B beside A [90 % interval]':38}{'margin':18}"
    for t in proof.witness_results:
        needed = f", {t.test.needed} prompts would tell" if t.test.needed else ""
        word = f" ({t.word})" if t.word else ""
        figures = f"{t.a:9.4g}{t.b:9.4g}   {t.difference:38}{t.margin:18}"
        yield f"  {t.witness:{wide}}{figures}{t.standing.value}{word}{needed}"


def _words(legibility: Legibility) -> Iterator[str]:
    if legibility.test is None or legibility.a is None or legibility.b is None:
        return
    a, b = (f"{100 * missed:.1f} %" for missed in (legibility.a, legibility.b))
    difference = difference_in_words(legibility.test)
    yield ""
    yield f"{'words':14}{'A':>9}{'B':>9}   {'B beside A [90 % interval]':38}margin"
    yield f"  {'missed':12}{a:>9}{b:>9}   {difference:38}±{100 * legibility.test.margin:g} %"
    for words in lost_most(legibility):
        text = f"  {words.label}: A {read_in_words(words.a)}; B {read_in_words(words.b)}"
        yield from _wrapped(text, indent="    ")


def _speed(speed: SpeedAnswer) -> Iterator[str]:
    if speed.test is not None and speed.a_s is not None and speed.b_s is not None:
        a, b = seconds_in_words(speed.a_s), seconds_in_words(speed.b_s)
        yield ""
        yield f"{'latency':14}{'A':>9}{'B':>9}   {'B beside A [90 % interval]':38}margin"
        yield f"  {'median':12}{a:>9}{b:>9}   {ratio_in_words(speed.test):38}×1.05"
        if speed.after is not None:
            yield f"  {'A again':30}   {ratio_in_words(speed.after):38}×1.05"
    if speed.loads:
        limit = in_time(speed.loads)
        yield ""
        yield "under load" + (f", in time within {limit}" if limit else "")
    for load in speed.loads:
        yield from _wrapped(f"  {load_in_words(load)}", indent="    ")


def _checks(proof: Proof) -> Iterator[str]:
    if proof.checks or proof.findings:
        yield ""
        yield "checks of B"
    for check in proof.checks:
        yield from _wrapped(f"  {check.status.value:13}{check.name}: {check.reason}", indent=" " * 15)
    for finding in proof.findings:
        yield from _wrapped(f"  {'finding':13}{finding.text}", indent=" " * 15)
    if proof.why:
        yield ""
        yield from _wrapped(f"B's images differ: {proof.why}. The worst:")
    for pair in worst_pairs(proof.pairs):
        figures = f"match {pair.against['match']:.2f}, PSNR {pair.against['psnr_db']:.1f} dB"
        yield from _wrapped(f"  {pair.label}: {figures}", indent="    ")
        if pair.request:
            yield f"    {plain(pair.request)}"


def _failures(proof: Proof) -> Iterator[str]:
    if not proof.failures:
        return
    yield ""
    yield f"{count(len(proof.failures), 'image')} not compared"
    for failure in proof.failures[:_MOST]:
        yield from _wrapped(f"  {failure.side} {failure.what}: {failure.reason}", indent="    ")
    if len(proof.failures) > _MOST:
        yield f"  and {len(proof.failures) - _MOST} more; --format json lists all"


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(
        plain(text),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [""]


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


def load_in_words(load: SideLoad) -> str:
    """Return a load as a sentence, e.g. B, 8 clients: 2.1 images/s, p50 3.8 s, ..."""
    if load.row is None:
        return f"{load.side}: no load was measured: {load.reason}"
    figures = figures_of(load.row)
    parts = [f"{figure_text([figures.throughput])} images/s"]
    parts += [f"p{p} {figure_text([figures.latency_s[p]])} s" for p in (50, 95) if p in figures.latency_s]
    if figures.within_slo is not None:
        parts.append(f"in time {figure_text([figures.within_slo], percent=True)}")
    if figures.goodput is not None:
        parts.append(f"goodput {figure_text([figures.goodput])}/s")
    parts += [f"{number} {plain(kind)}" for kind, number in figures.errors.items()]
    return f"{load.side}, {name_of(load.row)}: {', '.join(parts)}"


def name_of(row: LoadRow) -> str:
    """Return the name of a load, with the rate of users and its program."""
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    by = " by AIPerf" if row.client.get("engine") == "aiperf" else ""
    return f"{row.stage.name}{rate}{by}"


def in_time(loads: Sequence[SideLoad]) -> str:
    """Return a note on which images are in time; "" where no load has a limit."""
    slos = sorted({round(slo, 3) for load in loads if load.row is not None for slo in load.row.slo_s})
    return " or ".join(f"{slo:g} s" for slo in slos)


def cells_of(row: LoadRow) -> list[str]:
    """Return a load's figures: requests, images a second, p50, p95, in time, goodput, errors."""
    figures = figures_of(row)
    values = (figures.throughput, *(figures.latency_s.get(p) for p in (50, 95)))
    return [
        str(figures.num_requests),
        *(figure_text([value]) or "–" for value in values),
        figure_text([figures.within_slo], percent=True) or "–",
        figure_text([figures.goodput]) or "–",
        errors_text(figures.errors),
    ]


def speed_dict(speed: SpeedAnswer) -> dict[str, Any]:
    """Return the figures as JSON values."""
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
