"""Images inside a page: as data URIs, large ones as thumbnails, with their differences to a reference."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops

from vivace.answers.answer import ImageGrid, ImageRow

MAX_EMBEDDED_SIDE = 512  # pixels; a larger image is embedded as a thumbnail
THUMBNAIL_SIDE = 384
AMPLIFIED = 4  # factor by which differences are brightened
_SMALL_SIDE = 160  # pixels; images up to this size are shown in narrow columns, close to their real size
_WINDOW = 4  # the marked place is a fourth of the image's sides


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as a data URI. Sizes are in pixels; `is_thumbnail` if it is smaller than the stored image."""

    uri: str
    width: int
    height: int
    is_thumbnail: bool = False


@dataclass(frozen=True)
class EmbeddedCell:
    """An image of the page, or the reason why there is none.

    Attributes:
        difference: the amplified difference to the reference; `difference_note` gives its maximum, or the reason why
            there is none. Both are None for the reference itself.
        place: left, top, width and height of where they differ most, in percent.
    """

    image: EmbeddedImage | None
    note: str
    difference: EmbeddedImage | None = None
    difference_note: str | None = None
    place: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class EmbeddedRow:
    row: ImageRow
    cells: tuple[EmbeddedCell, ...]
    sources: tuple[tuple[str, EmbeddedImage], ...]

    @property
    def num_bytes(self) -> int:
        images = [image for cell in self.cells for image in (cell.image, cell.difference)]
        return sum(len(image.uri) for image in (*images, *(source for _, source in self.sources)) if image)


@dataclass(frozen=True)
class EmbeddedGrid:
    """The rows of a grid that its page has room for."""

    grid: ImageGrid
    rows: tuple[EmbeddedRow, ...]
    amplified: int = AMPLIFIED

    @property
    def is_small(self) -> bool:
        return all(
            max(cell.image.width, cell.image.height) <= _SMALL_SIDE
            for row in self.rows
            for cell in row.cells
            if cell.image
        )

    @property
    def has_thumbnails(self) -> bool:
        return any(
            cell.image is not None and cell.image.is_thumbnail for row in self.rows for cell in row.cells
        )

    @property
    def has_differences(self) -> bool:
        return any(cell.difference for row in self.rows for cell in row.cells)


def embed(grid: ImageGrid, max_bytes: int) -> EmbeddedGrid:
    """Return a grid with its images."""
    rows: list[EmbeddedRow] = []
    left = max_bytes
    for row in grid.rows:
        embedded = _row(grid, row)
        left -= embedded.num_bytes
        if rows and left < 0:
            break
        rows.append(embedded)
    return EmbeddedGrid(grid, tuple(rows))


def _row(grid: ImageGrid, row: ImageRow) -> EmbeddedRow:
    """Embed a row. Each distinct image is read once."""
    by_key: dict[str, Image.Image | str] = {}
    for key in (*(cell.key for cell in row.cells), *(key for _, key in row.sources)):
        if key is not None and key not in by_key:
            by_key[key] = grid.read(key)
    images = [None if cell.key is None else by_key[cell.key] for cell in row.cells]
    reference = images[0] if grid.has_reference else None
    cells = []
    for number, (image, cell) in enumerate(zip(images, row.cells, strict=True)):
        if not isinstance(image, Image.Image):
            cells.append(EmbeddedCell(None, image or cell.note))
        elif number == 0 or not grid.has_reference:
            cells.append(EmbeddedCell(_embed(image), cell.note))
        else:
            cells.append(_compared(image, reference, cell.note, grid.shows_difference))
    sources = ((name, by_key[key]) for name, key in row.sources)
    shown = tuple((name, _embed(image)) for name, image in sources if isinstance(image, Image.Image))
    return EmbeddedRow(row, tuple(cells), shown)


def _compared(
    image: Image.Image, reference: Image.Image | str | None, note: str, with_place: bool
) -> EmbeddedCell:
    embedded = _embed(image)
    if not isinstance(reference, Image.Image):
        return EmbeddedCell(embedded, note, None, "no image of the reference")
    if image.size != reference.size:
        sizes = f"{image.width} × {image.height} px, the reference {reference.width} × {reference.height}"
        return EmbeddedCell(embedded, note, None, sizes)
    # Subtracted at full size: thumbnails would average pixel-level differences away.
    difference = ImageChops.difference(image.convert("RGB"), reference.convert("RGB"))
    largest = max(high for _, high in difference.getextrema())  # type: ignore[misc]
    if largest == 0:
        return EmbeddedCell(embedded, note, None, "identical")
    amplified = _reduce(difference).point([min(255, AMPLIFIED * v) for v in range(256)] * 3)
    return EmbeddedCell(
        embedded,
        note,
        _encode(amplified, "WEBP", quality=50, method=4),
        f"at most {largest} of 255",
        place_of(difference) if with_place else None,
    )


def place_of(difference: Image.Image) -> tuple[float, float, float, float]:
    """Return the window in which two images differ most: left, top, width and height, in percent."""
    values = np.asarray(difference.convert("L"), dtype=np.float64)
    height, width = values.shape
    tall, wide = max(1, height // _WINDOW), max(1, width // _WINDOW)
    sums = np.pad(values, ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1)
    windows = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    y, x = np.unravel_index(int(windows.argmax()), windows.shape)
    left, top = 100 * float(x) / width, 100 * float(y) / height
    return round(left, 2), round(top, 2), round(100 * wide / width, 2), round(100 * tall / height, 2)


def decode(content: bytes | None) -> Image.Image | str:
    """Return a stored PNG as an image, or the reason why it is none."""
    if content is None:
        return "the image file is missing"
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow raises
        return "the image file is damaged"


def _embed(image: Image.Image) -> EmbeddedImage:
    """Return an image with its exact pixels, or a thumbnail of a large one."""
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        return _encode(image, "PNG", optimize=True)
    return _encode(_reduce(image), "WEBP", quality=85, method=4)


def _reduce(image: Image.Image) -> Image.Image:
    if max(image.size) <= MAX_EMBEDDED_SIDE:
        return image
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return small


def _encode(image: Image.Image, format_: str, **options: int | bool) -> EmbeddedImage:
    out = io.BytesIO()
    image.save(out, format_, **options)
    uri = f"data:image/{format_.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"
    return EmbeddedImage(uri, image.width, image.height, is_thumbnail=format_ == "WEBP")
