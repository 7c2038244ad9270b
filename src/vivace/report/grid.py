"""Pictures side by side: the same prompt and seed across a row, one recipe a column, the baseline first.

A page can be mailed, so it shows the rows that matter most. What a recipe lost in a picture is

    infinite                        if the picture is none (black, flat, noise) where the baseline's is one
    (reference - score) / margin    CLIP scores, for recipes that may change the picture (margin: see spec.limits)
    1 - SSIM                        for all others, and where there are no CLIP scores

and the rows are ordered by turns: first every recipe's worst picture, then every recipe's second worst, and so on;
within a turn the greatest loss first. Sorting by loss alone would fill the page with the worst cases of the one
recipe that is hopeless anyway. Pictures without figures, or whose SSIM would print as 1.000, have lost nothing; rows
of them follow in the order of drawing.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from PIL import Image, ImageChops

from vivace.report.rows import Row
from vivace.spec.figures import PictureFigures
from vivace.spec.record import Picture

ReadPicture = Callable[[str], bytes | None]
Place = tuple[int, str, int]  # index, prompt, seed

MAX_ROWS = 12
MAX_EMBEDDED_SIDE = 512  # pixels; a larger picture is embedded as a thumbnail
THUMBNAIL_SIDE = 384
_LEAST_LOSS = 0.0005
AMPLIFIED = 4  # differences are shown this many times as bright
_SMALL_SIDE = 160  # pictures up to this side are shown in narrow columns, near their own size


@dataclass(frozen=True)
class Column:
    number: int
    row: Row


@dataclass(frozen=True)
class Embedded:
    """A picture as a data URI, pixels; `is_thumbnail` if it is smaller than the stored one."""

    uri: str
    width: int
    height: int
    is_thumbnail: bool = False


@dataclass(frozen=True)
class Cell:
    """A picture in the grid, or why there is none.

    `difference` is its difference to the baseline's picture, and `apart` how large that is at most, or why there is
    none; both None in the baseline's column.
    """

    picture: Embedded | None
    title: str
    note: str | None
    difference: Embedded | None = None
    apart: str | None = None


@dataclass(frozen=True)
class GridRow:
    prompt: str
    seed: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """`order` says in words which rows are shown, and in what order."""

    columns: tuple[Column, ...]
    rows: tuple[GridRow, ...]
    without: tuple[Column, ...]
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


def grid(rows: Sequence[Row], read_picture: ReadPicture, max_bytes: int) -> Grid:
    """The grid of one run.

    Args:
        rows: the baseline first.
        read_picture: gives the PNG of a picture by its sha256, or None if its file is missing.
        max_bytes: what the embedded pictures may take together; one row is shown whatever it takes.
    """
    pictures = {number: _pictures(row) for number, row in enumerate(rows, 1)}
    columns = tuple(Column(n, row) for n, row in enumerate(rows, 1) if pictures[n])
    places = sorted({place for found in pictures.values() for place in found})
    losses = {c.number: _losses(c.row, pictures[c.number], rows[0], pictures[1]) for c in columns}
    ranks = {number: _ranks(found) for number, found in losses.items()}
    ordered = sorted(places, key=lambda place: _turn(place, ranks, losses))
    shown: list[GridRow] = []
    left = max_bytes
    for place in ordered[:MAX_ROWS]:
        cells = _cells(place, columns, pictures, ranks, read_picture)
        left -= sum(len(e.uri) for c in cells for e in (c.picture, c.difference) if e is not None)
        if shown and left < 0:
            break
        shown.append(GridRow(place[1], place[2], cells))
    embedded = [c.picture for row in shown for c in row.cells if c.picture is not None]
    return Grid(
        columns=columns,
        rows=tuple(shown),
        without=tuple(Column(n, row) for n, row in enumerate(rows, 1) if not pictures[n]),
        order=_told(len(shown), len(places), columns, ranks),
        is_small=max((max(e.width, e.height) for e in embedded), default=0) <= _SMALL_SIDE,
        has_thumbnails=any(e.is_thumbnail for e in embedded),
    )


def _pictures(row: Row) -> dict[Place, Picture]:
    """By index, prompt and seed: only pictures of the same words and noise stand side by side.

    A retried trial may have drawn its pictures in a later round than the first.
    """
    found = next((r.pictures for r in row.record.rounds if r.pictures), ())
    return {(p.index, p.prompt, p.seed): p for p in found}


def _losses(
    row: Row, pictures: Mapping[Place, Picture], baseline: Row, references: Mapping[Place, Picture]
) -> dict[Place, float]:
    """What the recipe lost in each picture, where it lost anything."""
    figures, originals = _by_picture(row), _by_picture(baseline)
    margin = _margin(baseline) if not row.record.trial.recipe.same_picture else None
    found = {}
    for place, picture in pictures.items():
        reference = references.get(place)
        if picture.faults:
            if row.is_baseline or reference is None or not reference.faults:
                found[place] = math.inf
            continue
        if reference is None:
            continue
        loss = _loss(
            figures.get((picture.sha256, reference.sha256, picture.prompt)),
            originals.get((reference.sha256, reference.sha256, picture.prompt)),
            margin,
        )
        if loss > _LEAST_LOSS:
            found[place] = loss
    return found


def _loss(figures: PictureFigures | None, original: PictureFigures | None, margin: float | None) -> float:
    if figures is None or figures.is_identical:
        return 0.0
    score = figures.alone.get("clip_score")
    reference = original.alone.get("clip_score") if original is not None else None
    if margin is not None and score is not None and reference is not None:
        return (reference - score) / margin
    return 1 - figures.against.get("ssim", 1.0)


def _by_picture(row: Row) -> dict[tuple[str, str, str], PictureFigures]:
    return {(f.sha256, f.reference, f.prompt): f for f in row.figures}


def _margin(baseline: Row) -> float | None:
    """How much better the baseline's pictures fit their own prompt than others; None if CLIP cannot tell."""
    found = [
        f.alone["clip_score"] - f.alone["clip_score_of_others"]
        for f in baseline.figures
        if {"clip_score", "clip_score_of_others"} <= f.alone.keys()
    ]
    margin = sum(found) / len(found) if found else 0.0
    return margin if margin > 0 else None


def _ranks(losses: Mapping[Place, float]) -> dict[Place, int]:
    """1 for the recipe's worst picture, 2 for the next, ..."""
    ordered = sorted(losses, key=lambda place: (-losses[place], place))
    return {place: rank for rank, place in enumerate(ordered, 1)}


def _turn(
    place: Place, ranks: Mapping[int, Mapping[Place, int]], losses: Mapping[int, Mapping[Place, float]]
) -> tuple[float, float, Place]:
    """The key that the rows are sorted by."""
    rank = min((found[place] for found in ranks.values() if place in found), default=math.inf)
    loss = max((found[place] for found in losses.values() if place in found), default=0.0)
    return rank, -loss, place


def _told(
    num_shown: int, num_places: int, columns: Sequence[Column], ranks: Mapping[int, Mapping[Place, int]]
) -> str:
    part = "" if num_shown == num_places else f" {num_shown} of {num_places}"
    ranked = [c for c in columns if ranks[c.number]]
    if not ranked:
        return f"The first{part}, in the order of drawing." if part else "In the order of drawing."
    start = f"The worst{part}" if part else "Worst first"
    if len(ranked) == 1:
        return f"{start}: ordered by what the recipe lost."
    return f"{start}: every recipe’s worst picture, then every recipe’s second worst, and so on."


def _cells(
    place: Place,
    columns: Sequence[Column],
    pictures: Mapping[int, Mapping[Place, Picture]],
    ranks: Mapping[int, Mapping[Place, int]],
    read_picture: ReadPicture,
) -> tuple[Cell, ...]:
    """One row of the grid. Each picture is read and decoded once, however many recipes drew the same."""
    reference = pictures[1].get(place) if columns[0].row.is_baseline else None
    original = _decode(read_picture(reference.sha256)) if reference is not None else None
    known: dict[str, Cell] = {}
    cells = []
    for column in columns:
        picture = pictures[column.number].get(place)
        if picture is None:
            cells.append(Cell(None, "", "not drawn"))
            continue
        if picture.sha256 not in known:
            known[picture.sha256] = _cell(read_picture(picture.sha256), original)
        cell = known[picture.sha256]
        if column.row.is_baseline:
            cell = replace(cell, difference=None, apart=None)
        title = f"{column.row.recipe}: {picture.prompt} (seed {picture.seed})"
        is_worst = ranks[column.number].get(place) == 1 and len(ranks[column.number]) > 1
        note = cell.note or _note(column.row, picture, reference, cell, is_worst)
        cells.append(replace(cell, title=title, note=note))
    return tuple(cells)


def _note(row: Row, picture: Picture, reference: Picture | None, cell: Cell, is_worst: bool) -> str | None:
    """What stands under a picture: its faults, and the figure that the recipe is held to."""
    parts = list(picture.faults)
    found = _by_picture(row).get((picture.sha256, reference.sha256 if reference else "", picture.prompt))
    if not row.is_baseline and cell.apart == _IDENTICAL:
        parts.append("identical to the baseline’s")
    elif found is not None:
        if "clip_score" in found.alone and (row.is_baseline or not row.record.trial.recipe.same_picture):
            parts.append(f"CLIP {found.alone['clip_score']:.1f}")
        elif "ssim" in found.against:
            parts.append(f"SSIM {found.against['ssim']:.3f}")
    if is_worst:
        parts.append("its worst")
    return ", ".join(parts) or None


_IDENTICAL = "identical"


def _cell(png: bytes | None, original: Image.Image | None) -> Cell:
    """The picture, byte for byte or as a thumbnail, and its difference to the baseline's."""
    if png is None:
        return Cell(None, "", "the picture’s file is missing")
    image = _decode(png)
    if image is None:
        return Cell(None, "", "the picture’s file is damaged")
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        shown = Embedded(_data_uri("png", png), image.width, image.height)
    else:
        shown = replace(_webp(_small(image), quality=85), is_thumbnail=True)
    if original is None:
        return Cell(shown, "", None, None, "no picture of the baseline")
    if image.size != original.size:
        apart = f"{image.width} × {image.height} px, the baseline’s {original.width} × {original.height}"
        return Cell(shown, "", None, None, apart)
    # Subtracted at full size: of two thumbnails what differs pixel by pixel would be gone already.
    difference = ImageChops.difference(image, original)
    largest = max(high for _, high in difference.getextrema())  # type: ignore[misc]
    if largest == 0:
        return Cell(shown, "", None, None, _IDENTICAL)
    amplified = _small(difference).point([min(255, AMPLIFIED * v) for v in range(256)] * 3)
    return Cell(shown, "", None, _webp(amplified, quality=50), f"at most {largest} of 255")


def _decode(png: bytes | None) -> Image.Image | None:
    """RGB; None if the file is missing or damaged."""
    if png is None:
        return None
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow raises
        return None


def _small(image: Image.Image) -> Image.Image:
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        return image
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return small


def _webp(image: Image.Image, quality: int) -> Embedded:
    out = io.BytesIO()
    image.save(out, "WEBP", quality=quality, method=4)
    return Embedded(_data_uri("webp", out.getvalue()), image.width, image.height)


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
