"""Every kind of image that people bring is read by one reader, and shows what its maker saw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vivace.errors import UsageError
from vivace.foundation.untrusted.image_files import open_image, open_mask
from vivace.models.sources import Files, PixelLimits, source_images_of

SIDE = 16
RAMP = np.tile(np.linspace(0, 1, SIDE), (SIDE, 1))
GREY = np.round(255 * RAMP).astype(np.uint8)
LEFT = np.zeros((SIDE, SIDE), np.uint8)
LEFT[:, :6] = 255


def saved(folder: Path, name: str, picture: Any, **options: Any) -> Path:
    picture.save(folder / name, **options)
    return folder / name


def sixteen() -> Any:
    return Image.fromarray(np.round(65535 * RAMP).astype(np.uint16))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("depth.png", sixteen),
        ("depth.tiff", sixteen),
        ("big-endian.tiff", lambda: sixteen().convert("I").convert("I;16B")),
        ("integers.tiff", lambda: Image.fromarray(np.round(65535 * RAMP).astype(np.int32))),
        ("floats.tiff", lambda: Image.fromarray(RAMP.astype(np.float32))),
        ("grey.png", lambda: Image.fromarray(GREY)),
        ("opaque.png", lambda: Image.fromarray(GREY).convert("RGBA")),
        ("opaque-grey.png", lambda: Image.fromarray(GREY).convert("LA")),
        ("palette.png", lambda: Image.fromarray(GREY).convert("P")),
        ("cmyk.tiff", lambda: Image.fromarray(GREY).convert("RGB").convert("CMYK")),
    ],
)
def test_a_grey_ramp_is_read_as_one(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    path, notes = saved(tmp_path, name, make()), []
    read = open_image(path, notes.append)
    assert read.mode == "RGB"
    assert np.abs(np.asarray(read).astype(int) - GREY[..., None]).max() <= 1
    assert np.array_equal(np.asarray(open_mask(path)) == 255, np.asarray(read.convert("L")) >= 128)
    assert notes == []


@pytest.mark.parametrize(
    ("name", "picture", "says"),
    [
        ("metres.tiff", Image.fromarray(10 * RAMP.astype(np.float32)), "floating-point numbers from 0 to 10"),
        ("nan.tiff", Image.fromarray(np.full((4, 4), np.nan, np.float32)), "floating-point numbers from nan"),
        (
            "negative.tiff",
            Image.fromarray((RAMP - 0.5).astype(np.float32)),
            "floating-point numbers from -0.5",
        ),
        (
            "large.tiff",
            Image.fromarray((1e6 * RAMP).astype(np.int32)),
            "whole numbers of 32 bits from 0 to 1e+06",
        ),
        ("small.tiff", Image.fromarray(GREY.astype(np.int32)), "whole numbers of 32 bits from 0 to 255"),
    ],
)
def test_numbers_without_a_known_white_are_refused(
    tmp_path: Path, name: str, picture: Any, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_image(saved(tmp_path, name, picture))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_dim_image_of_16_bits_is_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    open_image(
        saved(tmp_path, "mm.png", Image.fromarray(np.round(3000 * RAMP).astype(np.uint16))), notes.append
    )
    assert notes == [
        "it has 16 bits and its brightest value is 3000 of 65535, nearly black; stretch it if that is white"
    ]


def test_frames_are_refused_and_exif_is_followed(tmp_path: Path) -> None:
    frames = [Image.fromarray(GREY), Image.fromarray(LEFT)]
    for name in ("moving.png", "moving.webp", "pages.tiff"):
        path = saved(tmp_path, name, frames[0], save_all=True, append_images=frames[1:])
        with pytest.raises(UsageError, match="it has 2 frames or pages; save one of them"):
            open_image(path)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    path = saved(tmp_path, "photo.png", Image.new("RGB", (32, 16)), exif=exif)
    assert open_image(path).size == open_mask(path).size == (16, 32)


def layer(colour: Any, alpha: np.ndarray) -> Any:
    pixels = np.zeros((SIDE, SIDE, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = colour, alpha
    return Image.fromarray(pixels)


def transparent_palette() -> Any:
    picture = Image.fromarray((LEFT > 0).astype(np.uint8)).convert("P")
    picture.putpalette([255, 255, 255] * 2)
    picture.info["transparency"] = 0
    return picture


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer(0, LEFT),
        lambda: layer(255, LEFT),
        lambda: layer((200, 30, 30), LEFT),
        lambda: layer(LEFT[..., None], LEFT),
        lambda: layer(255, LEFT // 2 + LEFT // 4),
        lambda: Image.merge("LA", [Image.new("L", (SIDE, SIDE), 255), Image.fromarray(LEFT)]),
        lambda: Image.merge("LA", [Image.new("L", (SIDE, SIDE), 0), Image.fromarray(LEFT)]),
        transparent_palette,
        lambda: Image.fromarray(LEFT),
        lambda: Image.fromarray(LEFT).convert("1"),
        lambda: Image.fromarray(LEFT).convert("RGBA"),
        lambda: Image.fromarray(LEFT.astype(np.uint16) * 257),
    ],
)
def test_a_mask_is_where_it_was_painted(tmp_path: Path, make: Callable[[], Any]) -> None:
    assert np.array_equal(np.asarray(open_mask(saved(tmp_path, "mask.png", make()))), LEFT)


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        (layer(np.stack([GREY] * 3, axis=-1), LEFT), "mark different areas"),
        (layer(255 - LEFT[..., None], LEFT), "mark different areas"),
        (layer(255, np.zeros((SIDE, SIDE), np.uint8)), "transparent everywhere"),
    ],
)
def test_a_mask_that_could_be_two_is_refused(tmp_path: Path, picture: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_mask(saved(tmp_path, "mask.png", picture))


def test_transparent_pixels_of_an_image_lie_on_white_and_that_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path, "cut-out.png", layer((200, 30, 30), LEFT))
    pictures = source_images_of("image", Files([str(path)]), 1, (SIDE, SIDE), PixelLimits(8, 512, SIDE, SIDE))
    assert pictures.notes == (f"{path}: it has transparent pixels, which are put on white",)
    (read,) = pictures.by_sha.values()
    assert read.getpixel((0, 0)) == (200, 30, 30)
    assert read.getpixel((SIDE - 1, 0)) == (255, 255, 255)
