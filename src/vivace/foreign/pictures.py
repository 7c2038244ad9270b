"""Open images that others made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vivace.errors import UsageError
from vivace.foreign.files import open_plain
from vivace.foreign.reading import reading

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 4096 * 4096
"""The largest images of published models; metrics need about 100 bytes a pixel."""
_MAX_BYTES = 500_000_000


def open_picture(path: Path) -> Any:
    """Return an image as RGB (PIL).

    Raises:
        UsageError: it is not a regular file, not an image in one of FORMATS, damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    with (
        reading(path, UsageError, problem="cannot be read as an image"),
        open_plain(path, _MAX_BYTES) as file,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused below
            # Only these formats: some of the others start programs (Ghostscript).
            try:
                picture = Image.open(file, formats=FORMATS)
            except UnidentifiedImageError:
                raise ValueError(f"it is none of {', '.join(FORMATS)}, or is damaged") from None
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"it has {width}x{height} pixels; at most {MAX_PIXELS:,} are read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return picture.convert("RGB")
