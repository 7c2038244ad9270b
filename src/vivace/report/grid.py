"""Images side by side: one prompt and seed per row, one recipe per column, the baseline first.

A page must stay small enough to be mailed, so it shows the most important rows. The loss of an image is

    infinite                        if it is broken (black, flat, noise) and the baseline's is not
    (reference - score) / margin    CLIP scores, for recipes that may change the image (margin: see spec.limits)
    1 - SSIM                        for all other recipes, and without CLIP scores

Rows are ordered by rank: first every recipe's worst image, then every recipe's second worst, and so on; within a rank
the greatest loss first. Sorted by loss alone, the worst cases of a single bad recipe would fill the page. Images
without figures, or whose SSIM would print as 1.000, have no loss; their rows follow in the order of generation.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from PIL import Image, ImageChops

from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.record import ImageRecord
from vivace.report.rows import Row

ImageReader = Callable[[str], bytes | None]
ImageKey = tuple[int, str, int]  # index, prompt, seed

MAX_ROWS = 12
MAX_EMBEDDED_SIDE = 512  # pixels; a larger image is embedded as a thumbnail
THUMBNAIL_SIDE = 384
_MIN_LOSS = 0.0005
AMPLIFIED = 4  # factor by which differences are brightened
_SMALL_SIDE = 160  # pixels; images up to this size are shown in narrow columns, close to their real size


@dataclass(frozen=True)
class GridColumn:
    number: int
    row: Row


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as a data URI. Sizes are in pixels; `is_thumbnail` if it is smaller than the stored image."""

    uri: str
    width: int
    height: int
    is_thumbnail: bool = False


@dataclass(frozen=True)
class GridCell:
    """An image in the grid, or the reason why there is none.

    `difference` is the amplified difference to the baseline's image; `difference_note` gives its maximum, or the reason
    why there is none. Both are None in the baseline's column.
    """

    picture: EmbeddedImage | None
    title: str
    note: str | None
    difference: EmbeddedImage | None = None
    difference_note: str | None = None


@dataclass(frozen=True)
class GridRow:
    """One prompt and seed. `sources` are the images that its images were made from: "source", "mask", "control"."""

    prompt: str
    seed: int
    cells: tuple[GridCell, ...]
    sources: tuple[tuple[str, EmbeddedImage], ...] = ()


@dataclass(frozen=True)
class Grid:
    """All columns and rows. `order` describes which rows are shown, and in what order."""

    columns: tuple[GridColumn, ...]
    rows: tuple[GridRow, ...]
    without_images: tuple[GridColumn, ...]
    order: str
    is_small: bool
    has_thumbnails: bool
    amplified: int = AMPLIFIED

    @property
    def has_reference(self) -> bool:
        return bool(self.columns) and self.columns[0].row.is_baseline

    @property
    def has_differences(self) -> bool:
        return any(cell.difference for row in self.rows for cell in row.cells)


def grid(rows: Sequence[Row], read_image: ImageReader, max_bytes: int) -> Grid:
    """Return the grid of one run.

    Args:
        rows: the rows, the baseline first.
        read_image: returns the PNG of an image, or of a source, by its sha256; None if its file is missing.
        max_bytes: limit on all embedded images together; one row is shown in any case.
    """
    images = {number: _pictures(row) for number, row in enumerate(rows, 1)}
    columns = tuple(GridColumn(n, row) for n, row in enumerate(rows, 1) if images[n])
    keys = sorted({key for by_key in images.values() for key in by_key})
    losses = {c.number: _losses(c.row, images[c.number], rows[0], images[1]) for c in columns}
    ranks = {number: _ranks(values) for number, values in losses.items()}
    ordered = sorted(keys, key=lambda key: _sort_key(key, ranks, losses))
    grid_rows: list[GridRow] = []
    left = max_bytes
    for key in ordered[:MAX_ROWS]:
        cells = _cells(key, columns, images, ranks, read_image)
        sources = _sources(rows[0], key, read_image)
        left -= sum(len(e.uri) for c in cells for e in (c.picture, c.difference) if e is not None)
        left -= sum(len(embedded.uri) for _, embedded in sources)
        if grid_rows and left < 0:
            break
        grid_rows.append(GridRow(key[1], key[2], cells, sources))
    embedded = [c.picture for row in grid_rows for c in row.cells if c.picture is not None]
    return Grid(
        columns=columns,
        rows=tuple(grid_rows),
        without_images=tuple(GridColumn(n, row) for n, row in enumerate(rows, 1) if not images[n]),
        order=_describe_order(len(grid_rows), len(keys), columns, ranks),
        is_small=max((max(e.width, e.height) for e in embedded), default=0) <= _SMALL_SIDE,
        has_thumbnails=any(e.is_thumbnail for e in embedded),
    )


def _pictures(row: Row) -> dict[ImageKey, ImageRecord]:
    """Return a row's images by index, prompt and seed, since only images of the same prompt and noise are comparable.

    A retried trial may have generated its images in a later round.
    """
    images = next((r.pictures for r in row.record.rounds if r.pictures), ())
    return {(p.index, p.prompt, p.seed): p for p in images}


def _sources(row: Row, key: ImageKey, read_image: ImageReader) -> tuple[tuple[str, EmbeddedImage], ...]:
    """Return the source images of an image, with their names; none for text."""
    source = row.record.trial.workload.source_of(key[0])
    if source is None:
        return ()
    named = (("source", source.image), ("mask", source.mask), ("control", source.control))
    embedded_sources = (
        (name, _cell(read_image(sha), None).picture) for name, sha in named if sha is not None
    )
    return tuple((name, embedded) for name, embedded in embedded_sources if embedded is not None)


def _losses(
    row: Row,
    images: Mapping[ImageKey, ImageRecord],
    baseline: Row,
    references: Mapping[ImageKey, ImageRecord],
) -> dict[ImageKey, float]:
    """Return the loss of each image that has one."""
    figures, originals = _by_image(row), _by_image(baseline)
    margin = _margin(baseline) if not row.record.trial.recipe.same_picture else None
    losses = {}
    for key, image in images.items():
        reference = references.get(key)
        if image.faults:
            if row.is_baseline or reference is None or not reference.faults:
                losses[key] = math.inf
            continue
        if reference is None:
            continue
        loss = _loss(
            figures.get((image.sha256, reference.sha256, image.prompt)),
            originals.get((reference.sha256, reference.sha256, image.prompt)),
            margin,
        )
        if loss > _MIN_LOSS:
            losses[key] = loss
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


def _ranks(losses: Mapping[ImageKey, float]) -> dict[ImageKey, int]:
    """Rank a recipe's images: 1 for the worst, 2 for the next, ..."""
    ordered = sorted(losses, key=lambda key: (-losses[key], key))
    return {key: rank for rank, key in enumerate(ordered, 1)}


def _sort_key(
    key: ImageKey,
    ranks: Mapping[int, Mapping[ImageKey, int]],
    losses: Mapping[int, Mapping[ImageKey, float]],
) -> tuple[float, float, ImageKey]:
    """Order rows by their best rank, then by their greatest loss."""
    rank = min((by_key[key] for by_key in ranks.values() if key in by_key), default=math.inf)
    loss = max((by_key[key] for by_key in losses.values() if key in by_key), default=0.0)
    return rank, -loss, key


def _describe_order(
    num_shown: int,
    num_rows: int,
    columns: Sequence[GridColumn],
    ranks: Mapping[int, Mapping[ImageKey, int]],
) -> str:
    part = "" if num_shown == num_rows else f" {num_shown} of {num_rows}"
    ranked = [c for c in columns if ranks[c.number]]
    if not ranked:
        return f"The first{part}, in the order of generation." if part else "In the order of generation."
    start = f"The worst{part}" if part else "Worst first"
    if len(ranked) == 1:
        return f"{start}, by the recipe’s loss against the baseline."
    return f"{start}: every recipe’s worst image, then every recipe’s second worst, and so on."


def _cells(
    key: ImageKey,
    columns: Sequence[GridColumn],
    images: Mapping[int, Mapping[ImageKey, ImageRecord]],
    ranks: Mapping[int, Mapping[ImageKey, int]],
    read_image: ImageReader,
) -> tuple[GridCell, ...]:
    """Return one row of the grid. Each distinct image is read and decoded once."""
    reference = images[1].get(key) if columns[0].row.is_baseline else None
    original = _decode(read_image(reference.sha256)) if reference is not None else None
    by_sha: dict[str, GridCell] = {}
    cells = []
    for column in columns:
        image = images[column.number].get(key)
        if image is None:
            cells.append(GridCell(None, "", "not generated"))
            continue
        if image.sha256 not in by_sha:
            by_sha[image.sha256] = _cell(read_image(image.sha256), original)
        cell = by_sha[image.sha256]
        if column.row.is_baseline:
            cell = replace(cell, difference=None, difference_note=None)
        title = f"{column.row.recipe}: {image.prompt} (seed {image.seed})"
        is_worst = ranks[column.number].get(key) == 1 and len(ranks[column.number]) > 1
        note = cell.note or _note(column.row, image, reference, cell, is_worst)
        cells.append(replace(cell, title=title, note=note))
    return tuple(cells)


def _note(
    row: Row, image: ImageRecord, reference: ImageRecord | None, cell: GridCell, is_worst: bool
) -> str | None:
    """Return the caption of an image: its faults, and the recipe's deciding figure."""
    parts = list(image.faults)
    figures = _by_image(row).get((image.sha256, reference.sha256 if reference else "", image.prompt))
    if not row.is_baseline and cell.difference_note == _IDENTICAL:
        parts.append("identical to the baseline’s")
    elif figures is not None:
        if "clip_score" in figures.alone and (row.is_baseline or not row.record.trial.recipe.same_picture):
            parts.append(f"CLIP {figures.alone['clip_score']:.1f}")
        elif "ssim" in figures.against:
            parts.append(f"SSIM {figures.against['ssim']:.3f}")
    if is_worst:
        parts.append("this recipe’s worst")
    return ", ".join(parts) or None


_IDENTICAL = "identical"


def _cell(png: bytes | None, original: Image.Image | None) -> GridCell:
    """Return the image, unchanged or as a thumbnail, with its difference to the baseline's."""
    if png is None:
        return GridCell(None, "", "the image file is missing")
    image = _decode(png)
    if image is None:
        return GridCell(None, "", "the image file is damaged")
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        embedded = EmbeddedImage(_data_uri("png", png), image.width, image.height)
    else:
        embedded = replace(webp_image(reduced(image), quality=85), is_thumbnail=True)
    if original is None:
        return GridCell(embedded, "", None, None, "no image of the baseline")
    if image.size != original.size:
        sizes = f"{image.width} × {image.height} px, the baseline’s {original.width} × {original.height}"
        return GridCell(embedded, "", None, None, sizes)
    # Subtracted at full size: thumbnails would average pixel-level differences away.
    difference = ImageChops.difference(image, original)
    largest = max(high for _, high in difference.getextrema())  # type: ignore[misc]
    if largest == 0:
        return GridCell(embedded, "", None, None, _IDENTICAL)
    amplified = reduced(difference).point([min(255, AMPLIFIED * v) for v in range(256)] * 3)
    return GridCell(embedded, "", None, webp_image(amplified, quality=50), f"at most {largest} of 255")


def _decode(png: bytes | None) -> Image.Image | None:
    """Decode to RGB; None if the file is missing or damaged."""
    if png is None:
        return None
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow raises
        return None


def reduced(image: Image.Image) -> Image.Image:
    """Return a large image as a thumbnail; others as they are."""
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        return image
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return small


def webp_image(image: Image.Image, quality: int) -> EmbeddedImage:
    """Return an image to embed in a page, compressed."""
    out = io.BytesIO()
    image.save(out, "WEBP", quality=quality, method=4)
    return EmbeddedImage(_data_uri("webp", out.getvalue()), image.width, image.height)


def png_image(image: Image.Image) -> EmbeddedImage:
    """Return an image to embed in a page, with its exact pixels."""
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return EmbeddedImage(_data_uri("png", out.getvalue()), image.width, image.height)


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
