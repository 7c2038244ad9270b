"""A proof as an answer: the verdict on each question, the figures behind it, and the images, the worst first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vivace.answers.answer import (
    Answer,
    Cell,
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
from vivace.benchmark.load_testing.load_answer import errors_text, figure_text
from vivace.benchmark.load_testing.load_rows import LoadRow, figures_of
from vivace.proofs.checks.pair_figures import Nearness, PairFigures
from vivace.proofs.checks.request_checks import Status
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.verdicts.as_good import Standing, WitnessResult
from vivace.proofs.verdicts.fast import SpeedAnswer, ratio_in_words, seconds_in_words
from vivace.proofs.verdicts.legible import ImageText, Legibility, WordsPair, difference_in_words
from vivace.proofs.verdicts.same import means, worst_pairs
from vivace.proofs.verdicts.verdict import ProofVerdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from vivace.proofs.verdicts.proof import Proof

_LOOKS: dict[ProofVerdict, Look] = {ProofVerdict.PROVEN: "good", ProofVerdict.FAILED: "bad"}
_METRICS = {"psnr_db": "PSNR, dB", "ssim": "SSIM", "match": "match", "lpips": "LPIPS"}
_PAIRED = ("A", "B", "B beside A [90 % interval]", "margin", "verdict")
MAX_ROWS = 12
MAX_EQUAL_ROWS = 4  # where there is nothing to see
_MOST_WORDS = 6
_LONGEST = 200  # letters of what was read


def answer_of(proof: Proof, command: str = "") -> Answer:
    """Return the answer of a proof.

    Args:
        command: a command line or call that repeats it.
    """
    return Answer(
        command="prove",
        headline=f"{proof.headline}.",
        data=proof.to_dict(),
        verdict=proof.verdict.value,
        about=(f"A = {proof.a} (the reference)", f"B = {proof.b}", described(proof)),
        facts=Facts(tuple(_questions(proof)), are_tiles=True),
        sections=(
            *_checks(proof),
            Section("Images", (images_of(proof),), where="page"),
            Section("Same image?", (_distances(proof), Facts(tuple(_worst(proof)), _why(proof)))),
            Section("As good?", (_witnesses(proof),)),
            *_words(proof.legibility),
            Section("Fast?", (_latency(proof.speed), _loads(proof.speed))),
            Section("Not compared", (Facts(tuple(_failures(proof))),)),
        ),
        notes=proof.notes,
        reproduce=command,
    )


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
    # A different or slower image is not a fault by itself.
    is_claimed = {"Same image?": "same" in proof.claims, "Fast?": "fast" in proof.claims}
    for question, answer in proof.answers.items():
        is_open = answer.verdict is not ProofVerdict.PROVEN and not is_claimed.get(question, True)
        yield Fact(question, answer.word, answer.reason, "open" if is_open else _look(answer.verdict))
    for limit in proof.fail_under:
        yield Fact(f"--fail-under {limit.metric}", limit.verdict.value, limit.text, _look(limit.verdict))
    yield Fact("claimed", f"{', '.join(proof.claims)}: {proof.verdict.value}", look=_look(proof.verdict))


def _look(verdict: ProofVerdict) -> Look:
    return _LOOKS.get(verdict, "open")


def _checks(proof: Proof) -> Iterator[Section]:
    """Yield findings and checks, those that passed by themselves."""
    facts = [Fact("finding", finding.text, look="bad", request=finding.request) for finding in proof.findings]
    looks: dict[Status, Look] = {Status.FAILED: "bad", Status.UNCLEAR: "open", Status.PASSED: "good"}
    checks = {
        status: [
            Fact(status.value, check.name, check.reason, looks[status], check.request)
            for check in proof.checks
            if check.status is status
        ]
        for status in looks
    }
    facts += [*checks[Status.FAILED], *checks[Status.UNCLEAR]]
    yield Section("Honest?", (Facts(tuple(facts), "Whether B does what it is asked for." if facts else ""),))
    passed = checks[Status.PASSED]
    yield Section(f"{count(len(passed), 'check')} of B passed", (Facts(tuple(passed)),), is_folded=True)


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


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return "equal" if math.isinf(value) else f"{value:.1f}" if name == "psnr_db" else f"{value:.3f}"


def _distances(proof: Proof) -> Table:
    rows = distance_rows(proof)
    names = [name for name in _METRICS if any(name in values for _, _, values in rows)]
    levels = [pair.nearness for pair in proof.pairs if pair.against]
    counts = ", ".join(f"{levels.count(level)} {level.value}" for level in Nearness if level in levels)
    note = (
        "PSNR and SSIM average over the image; match is the share of A’s contrast that B reproduces: 1 for the same "
        "image, 0 and less for another one. Equal images have no PSNR; its mean is that of the others."
    )
    return Table.of(
        ("distances, means", "pairs", *(_METRICS[name] for name in names)),
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
        look: Look = (
            "bad" if t.standing is Standing.WORSE else "open" if t.standing is Standing.UNCLEAR else "good"
        )
        needed = f"about {t.test.needed} prompts would tell" if t.test.needed else ""
        note = ", ".join(part for part in (t.word, needed) if part)
        verdict = Cell(
            f"{t.standing.value} ({note})" if note else t.standing.value, t.standing.value, note, look=look
        )
        return (t.witness, f"{t.a:.4g}", f"{t.b:.4g}", t.difference, t.margin, verdict)

    note = (
        "Each witness is asked of every pair; the interval is over prompts. It says same if the whole 90 % interval is "
        "within the margin, and worse only if the mean is surely beyond it."
    )
    rows = [row(result) for result in proof.witness_results]
    return Table.of(("witness", *_PAIRED), rows, texts=_PAIRED[2:], note=note)


def _words(legibility: Legibility) -> Iterator[Section]:
    """Yield the requested words that are missed, and the images in which B loses most of them."""
    if legibility.test is None or legibility.a is None or legibility.b is None:
        return
    missed = (f"{100 * share:.1f} %" for share in (legibility.a, legibility.b))
    margin = f"±{100 * legibility.test.margin:g} %"
    verdict = Cell(legibility.answer.word, look=_look(legibility.answer.verdict))
    cells: tuple[str | Cell, ...] = ("missed", *missed, difference_in_words(legibility.test), margin, verdict)
    number = count(len(legibility.pairs), "pair")
    note = f"As they are read in {number} of images; case, spaces and punctuation do not count."
    worst = [words for words in legibility.pairs if words.lost > 0][:_MOST_WORDS]
    facts = (Fact(words.label, f"A {_read(words.a)}; B {_read(words.b)}") for words in worst)
    yield Section(
        "Legible?", (Table.of(("words in quotes", *_PAIRED), [cells], texts=_PAIRED[2:], note=note),)
    )
    yield Section("", (Facts(tuple(facts)),), where="text")
    yield Section("", (_words_grid(worst),), where="page")


def _words_grid(worst: Sequence[WordsPair]) -> ImageGrid:
    rows = [
        ImageRow(
            words.label,
            "",
            (ImageCell(f"{number} a", _read(words.a)), ImageCell(f"{number} b", _read(words.b))),
        )
        for number, words in enumerate(worst)
    ]
    return ImageGrid(("A", "B"), tuple(rows), _reader([words.pair for words in worst]))


def _read(text: ImageText) -> str:
    """Return the text read in an image, e.g. “OPFN”, 25 % missed."""
    read = " ".join(text.read.split())
    if not read:
        return "nothing is read"
    shortened = read if len(read) <= _LONGEST else f"{read[:_LONGEST]}…"
    return f"“{shortened}”, {100 * text.missed:.0f} % missed"


def _latency(speed: SpeedAnswer) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    if speed.test is not None and speed.a_s is not None and speed.b_s is not None:
        verdict = Cell(speed.answer.word, look=_look(speed.answer.verdict))
        figures = (seconds_in_words(speed.a_s), seconds_in_words(speed.b_s))
        rows.append(("median", *figures, ratio_in_words(speed.test), "×1.05", verdict))
        if speed.after is not None:
            rows.append(("A drawn again", "", "", ratio_in_words(speed.after), "×1.05", ""))
    note = (
        f"The seconds of {count(speed.num_pairs, 'pair')} of images, while they were drawn for this proof. The first "
        "image of each size is a warm-up."
    )
    return Table.of(("latency", *_PAIRED), rows, texts=_PAIRED[2:], note=note)


def _loads(speed: SpeedAnswer) -> Table:
    slos = sorted({round(slo, 3) for load in speed.loads if load.row is not None for slo in load.row.slo_s})
    headings = ("under load", "requests", "images/s", "p50, s", "p95, s", "in time", "goodput/s", "errors")
    note = f"In time within {' or '.join(f'{slo:g} s' for slo in slos)}." if slos else ""
    return Table.of(headings, [_load(load) for load in speed.loads], texts=("errors",), note=note)


def _load(load: SideLoad) -> tuple[str, ...]:
    if load.row is None:
        return (f"{load.side}: no load was measured: {load.reason}", *("–",) * 7)
    figures = figures_of(load.row)
    values = (figures.throughput, *(figures.latency_s.get(p) for p in (50, 95)))
    return (
        f"{load.side}, {name_of(load.row)}",
        str(figures.num_requests),
        *(figure_text([value]) or "–" for value in values),
        figure_text([figures.within_slo], percent=True) or "–",
        figure_text([figures.goodput]) or "–",
        errors_text(figures.errors),
    )


def name_of(row: LoadRow) -> str:
    """Return the name of a load, with the rate of users and its program."""
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    by = " by AIPerf" if row.client.get("engine") == "aiperf" else ""
    return f"{row.stage.name}{rate}{by}"


def _failures(proof: Proof) -> Iterator[Fact]:
    for failure in proof.failures:
        yield Fact(failure.side, failure.what, failure.reason, "bad", failure.request)


def images_of(proof: Proof) -> ImageGrid:
    """Return the images of each prompt and seed, the worst first, with the place where they differ most."""
    is_equal = all(math.isinf(pair.against.get("psnr_db", 0.0)) for pair in proof.pairs)
    number, total = MAX_EQUAL_ROWS if is_equal else MAX_ROWS, len(proof.pairs)
    pairs = sorted(proof.pairs, key=_order)[:number]
    about = "The worst first." if len(pairs) == total else f"The worst {len(pairs)} of {total}."
    if total > len(pairs) and is_equal:
        about = f"All {total} pairs are equal; {len(pairs)} of them."
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
        pair = pairs[int(number)]
        image = pair.a if side == "a" else pair.b
        picture: Image | str = image.reason if image.size is None else image.picture
        return picture

    return read


def _order(pair: PairFigures) -> tuple[int, float]:
    if (pair.b.faults and not pair.a.faults) or pair.has_hole:
        return 0, 0.0
    return (2, pair.against["match"]) if pair.against else (1, 0.0)


def _row(number: int, pair: PairFigures, proof: Proof) -> ImageRow:
    if pair.nearness is None:
        caption = pair.reason or "not compared"
    elif math.isinf(pair.against["psnr_db"]):
        caption = "every pixel is equal"
    else:
        figures = [
            f"{name} {_metric(key, pair.against[key])}"
            for key, name in _METRICS.items()
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
