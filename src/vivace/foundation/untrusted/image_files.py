"""Open foreign images: the one reader of images in vivace.

Numbers of 16 bits are scaled by their whole range, so 65535 is white. Floating-point numbers are read between 0 and 1.
Other ranges do not tell which value is white, and are refused. Transparent pixels lie on white. A mask may be in the
alpha channel (`open_mask`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vivace.errors import UsageError
from vivace.foundation.untrusted.files import open_plain, reading

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 4096 * 4096
"""Most pixels: the largest images of published models; metrics need about 100 bytes a pixel."""
_UNREADABLE = "cannot be read as an image"
_MAX_BYTES = 500_000_000
_SEVERAL = (
    "PNG",
    "WEBP",
    "TIFF",
)  # of several frames; a JPEG's others are previews and depth maps of the camera
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_DIM = 4096
"""Brightness below which an image of 16 bits is nearly black."""


def open_image(path: Path, note: Callable[[str], object] | None = None) -> Any:
    """Return an image as RGB (PIL), turned as its EXIF data says.

    Args:
        note: called with each assumption.

    Raises:
        UsageError: it is not a regular file, not an image in one of FORMATS, damaged, too large, or of numbers whose
            white is not known.
    """
    return _read(path, lambda image: _as_rgb(image, note or (lambda text: None)))


def open_mask(path: Path) -> Any:
    """Return a mask as black and white (PIL, mode L): white is repainted.

    White is where half or more of the light is. If the image has one colour and an alpha channel that varies, as a
    layer that was painted on has, the alpha channel is the mask: opaque is repainted.

    Raises:
        UsageError: as `open_image`; or colour and alpha channel mark different areas.
    """
    return _read(path, _as_mask)


def picture_in(data: bytes, name: str, note: Callable[[str], object] | None = None) -> Any:
    """Return an image from received bytes, as `open_image` does from a file.

    Args:
        name: what messages call it.

    Raises:
        UsageError: as `open_image`.
    """
    with reading(name, UsageError, problem=_UNREADABLE):
        return _converted(io.BytesIO(data), lambda picture: _as_rgb(picture, note or (lambda text: None)))


def mask_in(data: bytes, name: str) -> Any:
    """Return a mask from received bytes, as black and white (PIL, mode L): white is repainted.

    If its alpha channel varies, what is transparent is repainted, as the OpenAI images API has it. Otherwise white is
    where half or more of the light is; transparent everywhere, all is repainted.

    Raises:
        UsageError: as `open_image`.
    """
    with reading(name, UsageError, problem=_UNREADABLE):
        return _converted(io.BytesIO(data), _transparent_or_white)


def _read(path: Path, convert: Callable[[Any], Any]) -> Any:
    with reading(path, UsageError, problem=_UNREADABLE), open_plain(path, _MAX_BYTES) as file:
        return _converted(file, convert)


def _converted(file: BinaryIO, convert: Callable[[Any], Any]) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, which are refused below
        # Only these formats: some of the others start programs (Ghostscript).
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"it is none of {', '.join(FORMATS)}, or is damaged") from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"it has {width}x{height} pixels; at most {MAX_PIXELS:,} are read")
        if image.format in _SEVERAL and (number := getattr(image, "n_frames", 1)) > 1:
            raise ValueError(f"it has {number} frames or pages; save one of them")
        return convert(ImageOps.exif_transpose(image))


def _transparent_or_white(picture: Any) -> Any:
    import numpy as np
    from PIL import Image

    plain = _in_8_bits(picture, lambda text: None)
    alpha = _alpha_of(plain)
    if alpha is not None and alpha.getextrema() != (255, 255):
        repainted = np.asarray(alpha) < 128
    else:
        repainted = np.asarray(plain.convert("RGBA").convert("RGB").convert("L")) >= 128
    return Image.fromarray(repainted.astype(np.uint8) * 255)


def _as_rgb(image: Any, note: Callable[[str], object]) -> Any:
    from PIL import Image

    plain = _in_8_bits(image, note)
    alpha = _alpha_of(plain)
    if alpha is None:
        return plain.convert("RGB")
    white = Image.new("RGB", plain.size, (255, 255, 255))
    if alpha.getextrema() == (255, 255):
        return plain.convert("RGBA").convert("RGB")
    note("it has transparent pixels, which are put on white")
    white.paste(plain.convert("RGBA").convert("RGB"), mask=alpha)
    return white


def _as_mask(image: Any) -> Any:
    import numpy as np
    from PIL import Image

    plain = _in_8_bits(image, lambda text: None)
    alpha = _alpha_of(plain)
    colours = np.asarray((plain if alpha is None else plain.convert("RGBA")).convert("RGB"))
    light = np.asarray(Image.fromarray(colours).convert("L")) >= 128
    if alpha is not None and alpha.getextrema()[0] != alpha.getextrema()[1]:
        light = _mask_of_alpha(np.asarray(alpha), colours, light)
    elif alpha is not None and alpha.getextrema() == (0, 0):
        raise ValueError("it is transparent everywhere; paint white what is to change, on black")
    return Image.fromarray(light.astype(np.uint8) * 255)


def _mask_of_alpha(alpha: Any, colours: Any, light: Any) -> Any:
    """Return the mask of an image with an alpha channel that varies.

    Args:
        alpha: 0 to 255, height x width.
        colours: height x width x 3.
        light: where half or more of the light is.

    Raises:
        ValueError: colours and alpha channel mark different areas.
    """
    opaque, visible = alpha >= 128, alpha > 0
    visible_colours = colours[visible]
    has_one_colour = bool((visible_colours == visible_colours[0]).all())
    # Dark strokes on transparent white: a layer that was painted on, or black strokes that keep what is below them.
    is_inverse = has_one_colour and not light[visible].any() and bool(light[~visible].any())
    if has_one_colour and not is_inverse:
        return opaque
    if (opaque == (light & visible)).all():
        return opaque
    raise ValueError(
        "its colours and its transparency mark different areas, and either may be the mask; save it as white on black "
        "without transparency, white where to repaint"
    )


def _alpha_of(image: Any) -> Any:
    """Return an image's transparency (PIL, mode L); None if it has none."""
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return image.convert("RGBA").getchannel("A")
    return None


def _in_8_bits(image: Any, note: Callable[[str], object]) -> Any:
    """Return an image of numbers of at most 8 bits.

    Raises:
        ValueError: it has numbers of more bits, and it is not known which is white.
    """
    import numpy as np
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        if not (low >= 0.0 and high <= 1.0):
            raise ValueError(
                f"it has floating-point numbers from {low:g} to {high:g}; only 0 to 1 has a known white: divide by "
                "the value of white, or save it in 8 or 16 bits"
            )
        return Image.fromarray(np.round(255 * values).astype(np.uint8))
    # PIL has 16 bits as I;16, and older versions as I, which may also be 32 bits.
    if image.mode == "I" and (low < 0 or high > 65535 or 0 < high <= 255):
        raise ValueError(
            f"it has whole numbers of 32 bits from {low:g} to {high:g}, so which value is white is unclear; save it "
            "in 8 or 16 bits"
        )
    if 0 < high < _DIM:
        note(
            f"it has 16 bits and its brightest value is {high:g} of 65535, nearly black; stretch it if that is white"
        )
    return Image.fromarray(np.round(values / 257).astype(np.uint8))
