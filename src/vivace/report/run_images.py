"""Which images of a comparison are shown: one prompt and seed per row, one recipe per column, the baseline first.

A page must stay small enough to be mailed, so it shows the most important rows. The loss of an image is

    infinite                        if it is broken (black, flat, noise) and the baseline's is not
    (reference - score) / margin    CLIP scores, for recipes that may change the image (margin: see spec.limits)
    1 - SSIM                        for all other recipes, and without CLIP scores

Rows are ordered by rank: first every recipe's worst image, then every recipe's second worst, and so on; within a rank
the greatest loss first. Sorted by loss alone, the worst cases of a single bad recipe would fill the page. Images
without figures, or whose SSIM would print as 1.000, have no loss; their rows follow in the order of generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vivace.answers.answer import ImageCell, ImageGrid, ImageRow
from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.spec.record import ImageRecord
from vivace.report.rows import Row

if TYPE_CHECKING:
    from PIL.Image import Image

ReadImage = Callable[[str], "Image | str"]
"""Returns an image by its sha256, or the reason why there is none."""
ImageKey = tuple[int, str, int]  # index, prompt, seed

MAX_ROWS = 12
_MIN_LOSS = 0.0005


def no_images(sha256: str) -> str:
    """Return why there is no image, for rows whose store is gone or was never one."""
    return "the image file is missing"


def image_grid(rows: Sequence[Row], read: ReadImage) -> ImageGrid | None:
    images = {number: _images(row) for number, row in enumerate(rows, 1)}
    columns = [(number, row) for number, row in enumerate(rows, 1) if images[number]]
    if not columns:
        return None
    losses = {number: _losses(row, images[number], rows[0], images[1]) for number, row in columns}
    ranks = {  # 1 for a recipe's worst image, 2 for the next, ...
        number: {key: rank for rank, key in enumerate(sorted(of, key=lambda key: (-of[key], key)), 1)}
        for number, of in losses.items()
    }

    def order(key: ImageKey) -> tuple[float, float, ImageKey]:
        rank = min((of[key] for of in ranks.values() if key in of), default=math.inf)
        return rank, -max((of[key] for of in losses.values() if key in of), default=0.0), key

    keys = sorted({key for of in images.values() for key in of}, key=order)
    missing = [str(number) for number in images if not images[number]]
    without = f" No images of {', '.join(missing)}." if missing else ""
    num_ranked = sum(bool(of) for of in ranks.values())
    return ImageGrid(
        tuple(f"{number} {short_form(row.recipe)}" for number, row in columns),
        tuple(_row(key, columns, images, ranks, rows[0]) for key in keys[:MAX_ROWS]),
        read,
        f"One prompt and seed per row. {_order_in_words(len(keys), num_ranked)}{without}",
        has_reference=columns[0][1].is_baseline,
    )


def _images(row: Row) -> dict[ImageKey, ImageRecord]:
    """Return a row's images by index, prompt and seed, since only images of the same prompt and noise are comparable.

    A retried trial may have generated its images in a later round.
    """
    images = next((r.pictures for r in row.record.rounds if r.pictures), ())
    return {(image.index, image.prompt, image.seed): image for image in images}


def _row(
    key: ImageKey,
    columns: Sequence[tuple[int, Row]],
    images: Mapping[int, Mapping[ImageKey, ImageRecord]],
    ranks: Mapping[int, Mapping[ImageKey, int]],
    baseline: Row,
) -> ImageRow:
    reference, cells = images[1].get(key), []
    for number, row in columns:
        image = images[number].get(key)
        is_worst = ranks[number].get(key) == 1 and len(ranks[number]) > 1
        note = "not generated" if image is None else _note(row, image, reference, is_worst)
        cells.append(ImageCell(None if image is None else image.sha256, note))
    source = baseline.record.trial.workload.source_of(key[0])
    named = ((name, getattr(source, field)) for name, field in _SOURCES if source is not None)
    sources = tuple((name, sha) for name, sha in named if sha is not None)
    return ImageRow(key[1], f"seed {key[2]}", tuple(cells), sources)


_SOURCES = (("source", "image"), ("mask", "mask"), ("control", "control"))


def _note(row: Row, image: ImageRecord, reference: ImageRecord | None, is_worst: bool) -> str:
    """Return the caption of an image: its faults, and the recipe's deciding figure."""
    parts = list(image.faults)
    figures = _by_image(row).get((image.sha256, reference.sha256 if reference else "", image.prompt))
    if not row.is_baseline and reference is not None and image.sha256 == reference.sha256:
        parts.append("identical to the baseline’s")
    elif figures is not None:
        if "clip_score" in figures.alone and (row.is_baseline or not row.record.trial.recipe.same_picture):
            parts.append(f"CLIP {figures.alone['clip_score']:.1f}")
        elif "ssim" in figures.against:
            parts.append(f"SSIM {figures.against['ssim']:.3f}")
    if is_worst:
        parts.append("this recipe’s worst")
    return ", ".join(parts)


def _losses(
    row: Row,
    images: Mapping[ImageKey, ImageRecord],
    baseline: Row,
    references: Mapping[ImageKey, ImageRecord],
) -> dict[ImageKey, float]:
    figures, originals = _by_image(row), _by_image(baseline)
    margin = _margin(baseline) if not row.record.trial.recipe.same_picture else None
    losses = {}
    for key, image in images.items():
        reference = references.get(key)
        if image.faults and (row.is_baseline or reference is None or not reference.faults):
            losses[key] = math.inf
        elif reference is not None and not image.faults:
            sha = reference.sha256
            own = figures.get((image.sha256, sha, image.prompt))
            loss = _loss(own, originals.get((sha, sha, image.prompt)), margin)
            losses |= {key: loss} if loss > _MIN_LOSS else {}
    return losses


def _loss(figures: ImageFigures | None, original: ImageFigures | None, margin: float | None) -> float:
    if figures is None or figures.is_identical:
        return 0.0
    score = figures.alone.get("clip_score")
    reference = original.alone.get("clip_score") if original is not None else None
    if margin is not None and score is not None and reference is not None:
        return (reference - score) / margin
    return 1 - figures.against.get("ssim", 1.0)


def _by_image(row: Row) -> dict[tuple[str, str, str], ImageFigures]:
    return {(f.sha256, f.reference, f.prompt): f for f in row.figures}


def _margin(baseline: Row) -> float | None:
    """Return how much better the baseline's images fit their own prompts than others; None if not at all."""
    margins = [
        f.alone["clip_score"] - f.alone["clip_score_of_others"]
        for f in baseline.figures
        if {"clip_score", "clip_score_of_others"} <= f.alone.keys()
    ]
    margin = sum(margins) / len(margins) if margins else 0.0
    return margin if margin > 0 else None


def _order_in_words(number: int, num_ranked: int) -> str:
    part = "" if number <= MAX_ROWS else f" {MAX_ROWS} of {number}"
    if not num_ranked:
        return f"The first{part}, in the order of generation." if part else "In the order of generation."
    start = f"The worst{part}" if part else "Worst first"
    if num_ranked == 1:
        return f"{start}, by the recipe’s loss against the baseline."
    return f"{start}: every recipe’s worst image, then every recipe’s second worst, and so on."
