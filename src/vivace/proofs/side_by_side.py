"""The images that differ most, side by side, with the place where they differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vivace.measure.image_metrics import Pixels, luminance
from vivace.proofs.legible import Legibility
from vivace.proofs.lost_words import lost_most, read_in_words
from vivace.proofs.pair_figures import Nearness, PairFigures, ReadImage
from vivace.proofs.proof_text import metric
from vivace.report.grid import AMPLIFIED, MAX_EMBEDDED_SIDE, EmbeddedImage, png_image, reduced, webp_image

if TYPE_CHECKING:
    from vivace.proofs.proof import Proof

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
