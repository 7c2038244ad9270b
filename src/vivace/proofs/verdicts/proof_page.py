"""A proof as one offline HTML file, to be sent to a colleague."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from vivace import __version__
from vivace.foundation.untrusted.streams import plain
from vivace.measure.image_metrics import Pixels, luminance
from vivace.proofs.checks.pair_figures import Nearness, PairFigures, ReadImage
from vivace.proofs.checks.request_checks import Status
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.verdicts.as_good import Standing, WitnessResult
from vivace.proofs.verdicts.fast import SpeedAnswer, ratio_in_words, seconds_in_words
from vivace.proofs.verdicts.legible import Legibility, difference_in_words
from vivace.proofs.verdicts.proof_text import (
    cells_of,
    described,
    distance_rows,
    in_time,
    lost_most,
    metric,
    name_of,
    read_in_words,
)
from vivace.proofs.verdicts.verdict import ProofVerdict
from vivace.report.grid import AMPLIFIED, MAX_EMBEDDED_SIDE, EmbeddedImage, png_image, reduced, webp_image
from vivace.report.page import environment, policy_for, sorting_script, style_sheet

if TYPE_CHECKING:
    from vivace.proofs.verdicts.proof import Proof

_LOOKS = {
    ProofVerdict.PROVEN: "good",
    ProofVerdict.FAILED: "bad",
    ProofVerdict.UNCLEAR: "open",
    ProofVerdict.LEFT_OUT: "open",
}
_PAIRED_LOOKS = {ProofVerdict.FAILED: "bad", ProofVerdict.PROVEN: "good"}
_METRICS = (("PSNR, dB", "psnr_db"), ("SSIM", "ssim"), ("match", "match"), ("LPIPS", "lpips"))
MAX_ROWS = 12
MAX_EQUAL_ROWS = 4  # where there is nothing to see
MAX_BYTES = 12_000_000
_WINDOW = 4  # the marked place is a fourth of the image's sides


@dataclass(frozen=True)
class MarkedPlace:
    """A rectangle, in percent of the image's sides."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class PageImage:
    """An image with its caption, or the reason why there is none."""

    name: str
    embedded: EmbeddedImage | None
    caption: str


@dataclass(frozen=True)
class PageRow:
    """One prompt and seed: A's image, B's, and their difference, with the place where they differ most."""

    prompt: str
    seed: str
    images: tuple[PageImage, ...]
    place: MarkedPlace | None
    caption: str
    is_bad: bool
    request: str = ""


@dataclass(frozen=True)
class Tile:
    """A question with its verdict. `look` is "good", "bad" or "open"."""

    question: str
    verdict: str
    reason: str
    look: str


@dataclass(frozen=True)
class CheckLine:
    """A check or a finding, with the request that shows it."""

    name: str
    status: str
    reason: str
    look: str
    request: str


@dataclass(frozen=True)
class WitnessLine:
    """A witness's result, as printed."""

    witness: str
    a: str
    b: str
    difference: str
    margin: str
    standing: str
    note: str
    look: str


@dataclass(frozen=True)
class LoadLine:
    """A load on a side, with its figures; or the reason why there is none."""

    side: str
    load: str
    cells: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class PairedLine:
    """A paired figure of both sides, as printed."""

    pairs: int
    a: str
    b: str
    difference: str
    margin: str
    verdict: str
    look: str


def page_of(proof: Proof, command: str | None) -> str:
    """Return the page as HTML.

    Args:
        command: a command line or call that repeats it; None to leave it out.
    """
    style, script = style_sheet() + _own_style(), sorting_script()
    rows = rows_of(proof)
    metrics = [name for name in _METRICS if any(name[1] in values for _, _, values in distance_rows(proof))]
    return (
        environment("vivace.proofs")
        .get_template("prove.html")
        .render(
            proof=proof,
            title=_unbroken(plain(f"{proof.headline}.")),
            described=described(proof),
            finished=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            tiles=_tiles(proof),
            rows=rows,
            order=order_in_words(rows, proof),
            is_marked=any(row.place for row in rows),
            counts=counts(proof),
            metrics=[name for name, _ in metrics],
            distances=[
                (what, number, [metric(key, values.get(key)) for _, key in metrics])
                for what, number, values in distance_rows(proof)
            ],
            latency=_latency(proof.speed),
            loads=[_load(load) for load in proof.speed.loads],
            load_headings=("requests", "images/s", "p50, s", "p95, s", "in time", "goodput/s", "errors"),
            in_time=in_time(proof.speed.loads),
            words=_words(proof.legibility),
            words_rows=rows_of_words(proof.legibility),
            witnesses=[_witness(t) for t in proof.witness_results],
            checks=_checks(proof),
            command=None if command is None else plain(command),
            version=__version__,
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy_for(style, script)),
        )
    )


def _unbroken(text: str) -> str:
    """Return a text in which no line ends within the name of an option, as --scorer."""
    return text.replace("--", "-\N{WORD JOINER}-\N{WORD JOINER}")


def _own_style() -> str:
    return resources.files("vivace.proofs").joinpath("templates", "prove.css").read_text("utf-8")


def _tiles(proof: Proof) -> list[Tile]:
    is_claimed = {"Same image?": "same" in proof.claims, "Fast?": "fast" in proof.claims}
    tiles = [
        Tile(
            question,
            answer.word,
            _unbroken(answer.reason),
            # A different or slower image is not a fault by itself.
            _LOOKS[answer.verdict]
            if answer.verdict is ProofVerdict.PROVEN or is_claimed.get(question, True)
            else "open",
        )
        for question, answer in proof.answers.items()
    ]
    return tiles + [
        Tile(limit.metric, limit.verdict.value, limit.text, _LOOKS[limit.verdict])
        for limit in proof.fail_under
    ]


def _witness(t: WitnessResult) -> WitnessLine:
    notes: Sequence[str] = [t.word] if t.word else []
    if t.test.needed:
        notes = [*notes, f"about {t.test.needed} prompts would tell"]
    look = {Standing.WORSE: "bad", Standing.UNCLEAR: "open"}.get(t.standing, "good")
    return WitnessLine(
        t.witness,
        f"{t.a:.4g}",
        f"{t.b:.4g}",
        t.difference,
        t.margin,
        t.standing.value,
        ", ".join(notes),
        look,
    )


def _words(legibility: Legibility) -> PairedLine | None:
    if legibility.test is None or legibility.a is None or legibility.b is None:
        return None
    return PairedLine(
        len(legibility.pairs),
        f"{100 * legibility.a:.1f} %",
        f"{100 * legibility.b:.1f} %",
        difference_in_words(legibility.test),
        f"±{100 * legibility.test.margin:g} %",
        legibility.answer.word,
        _PAIRED_LOOKS.get(legibility.answer.verdict, "open"),
    )


def _latency(speed: SpeedAnswer) -> PairedLine | None:
    if speed.test is None or speed.a_s is None or speed.b_s is None:
        return None
    ratio_after = "" if speed.after is None else f"; beside A drawn again {ratio_in_words(speed.after)}"
    return PairedLine(
        speed.num_pairs,
        seconds_in_words(speed.a_s),
        seconds_in_words(speed.b_s),
        ratio_in_words(speed.test) + ratio_after,
        "×1.05",
        speed.answer.word,
        _PAIRED_LOOKS.get(speed.answer.verdict, "open"),
    )


def _load(load: SideLoad) -> LoadLine:
    if load.row is None:
        return LoadLine(load.side, "", (), load.reason)
    return LoadLine(load.side, name_of(load.row), tuple(cells_of(load.row)), "")


def _checks(proof: Proof) -> list[CheckLine]:
    looks = {Status.PASSED: "good", Status.FAILED: "bad", Status.UNCLEAR: "open"}
    lines = [CheckLine(finding.text, "finding", "", "bad", finding.request) for finding in proof.findings]
    checks = sorted(
        proof.checks, key=lambda check: [Status.FAILED, Status.UNCLEAR, Status.PASSED].index(check.status)
    )
    return lines + [
        CheckLine(check.name, check.status.value, check.reason, looks[check.status], check.request)
        for check in checks
    ]


def rows_of(proof: Proof) -> list[PageRow]:
    """Return the rows of the page, the worst first."""
    rows: list[PageRow] = []
    left = MAX_BYTES
    number = MAX_EQUAL_ROWS if _are_all_equal(proof) else MAX_ROWS
    for pair in sorted(proof.pairs, key=lambda pair: _order(pair, proof))[:number]:
        row = _row(pair, proof)
        left -= sum(len(image.embedded.uri) for image in row.images if image.embedded is not None)
        if rows and left < 0:
            break
        rows.append(row)
    return rows


def place_of(a: Pixels, b: Pixels) -> MarkedPlace | None:
    """Return the window in which two images of the same size differ most; None if they are equal."""
    height, width = a.shape[:2]
    tall, wide = max(1, height // _WINDOW), max(1, width // _WINDOW)
    difference = np.abs(luminance(np.abs(a - b)))
    if not difference.any():
        return None
    sums = np.pad(difference, ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1)
    windows = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    y, x = np.unravel_index(int(windows.argmax()), windows.shape)
    return MarkedPlace(
        round(100 * float(x) / width, 2),
        round(100 * float(y) / height, 2),
        round(100 * wide / width, 2),
        round(100 * tall / height, 2),
    )


def _are_all_equal(proof: Proof) -> bool:
    return all(math.isinf(pair.against.get("psnr_db", 0.0)) for pair in proof.pairs)


def _order(pair: PairFigures, proof: Proof) -> tuple[int, float]:
    if (pair.b.faults and not pair.a.faults) or pair.has_hole:
        return 0, 0.0
    if not pair.against:
        return 1, 0.0
    return 2, pair.against["match"]


def _row(pair: PairFigures, proof: Proof) -> PageRow:
    level = pair.nearness
    images = [
        _image("A", pair.a, ", ".join(pair.a.faults)),
        _image("B", pair.b, ", ".join(pair.b.faults)),
    ]
    place = None
    if pair.against and not math.isinf(pair.against["psnr_db"]):
        place = place_of(pair.a.pixels, pair.b.pixels)
        images.append(_difference(pair.a.pixels, pair.b.pixels))
    if level is None:
        caption = pair.reason or "not compared"
    elif math.isinf(pair.against["psnr_db"]):
        caption = "every pixel is equal"
    else:
        figures = [
            f"{name} {metric(key, pair.against[key])}"
            for name, key in (("PSNR", "psnr_db"), ("SSIM", "ssim"), ("match", "match"), ("LPIPS", "lpips"))
            if key in pair.against
        ]
        caption = ", ".join([level.value, *figures])
    seed = pair.seed_in_words if proof.knows_prompts else ""
    caption += ", with a hole" if pair.has_hole else ""
    is_bad = bool(pair.b.faults or pair.has_hole) or level in (None, Nearness.ANOTHER)
    return PageRow(pair.prompt, seed, tuple(images), place, caption, is_bad, pair.request)


def rows_of_words(legibility: Legibility) -> list[PageRow]:
    """Return the images in which B loses most of the requested words."""
    return [
        PageRow(
            words.label,
            "",
            (
                _image("A", words.pair.a, read_in_words(words.a)),
                _image("B", words.pair.b, read_in_words(words.b)),
            ),
            None,
            "",
            is_bad=False,
        )
        for words in lost_most(legibility)
    ]


def _image(name: str, image: ReadImage, caption: str) -> PageImage:
    if image.size is None:
        return PageImage(name, None, image.reason)
    picture, is_small = image.picture, max(image.size) <= MAX_EMBEDDED_SIDE
    embedded = png_image(picture) if is_small else webp_image(reduced(picture), quality=85)
    return PageImage(name, embedded, caption)


def _difference(a: Pixels, b: Pixels) -> PageImage:
    from PIL import Image

    difference = np.abs(a - b)
    image = Image.fromarray(np.clip(AMPLIFIED * difference, 0, 255).astype(np.uint8))
    return PageImage(
        f"difference × {AMPLIFIED}",
        webp_image(reduced(image), quality=60),
        f"at most {difference.max():.0f} of 255",
    )


def counts(proof: Proof) -> list[tuple[str, int]]:
    """Return the number of images by nearness."""
    levels = [pair.nearness for pair in proof.pairs if pair.against]
    return [(level.value, levels.count(level)) for level in Nearness if level in levels]


def order_in_words(rows: Sequence[PageRow], proof: Proof) -> str:
    """Describe the choice and order of the page's rows."""
    total = len(proof.pairs)
    if total > len(rows) and _are_all_equal(proof):
        return f"All {total} pairs are equal; {len(rows)} of them."
    return "The worst first." if len(rows) == total else f"The worst {len(rows)} of {total}."
