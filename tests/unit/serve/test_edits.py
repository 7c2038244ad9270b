"""Images that clients send: what is drawn from them, and what is refused."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.served import EDITS, Served, image_of
from vivace.foundation.spec.sizes import Size
from vivace.serve.http.edit_form import nearest_size
from vivace.serve.http.request_checks import LARGEST_UPLOAD
from vivace.serve.settings import ModelState, ServeSettings, StepTimes


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def png(size: tuple[int, int] = (16, 16), colour: Any = (7, 0, 0), mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, size, colour))


def bomb(side: int) -> bytes:
    """A PNG of so many pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def text_bomb() -> bytes:
    """A PNG whose text is 2 MB when it is decompressed: twice of what Pillow reads."""
    plain = png()
    data = b"Comment\0\0" + zlib.compress(b"x" * 2_000_000)
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return plain[:33] + chunk + plain[33:]


def halves(left: Any, right: Any, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> Image.Image:
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def blue(answer: Any) -> int:
    assert answer.status == 200, answer.body
    pixel = answer.images[0].getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[2])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no image is sent; add the file as image or image[]"),
        ({"image": b""}, "the image cannot be read as an image: it is none of PNG, JPEG, WEBP"),
        ({"image": b"<svg/>"}, "it is none of PNG, JPEG, WEBP, BMP, TIFF, or is damaged"),
        ({"image": bomb(9_000)}, "it has 9000x9000 pixels; at most 16,777,216 are read"),
        ({"image": bomb(60_000)}, "could be decompression bomb"),
        ({"image": text_bomb()}, "the image cannot be read as an image: "),
        ({"image": png((64, 64))[:90]}, "the image cannot be read as an image: "),
        (
            {"image": encoded(Image.new("F", (16, 16), 7.0), "TIFF")},
            "it has floating-point numbers from 7 to 7",
        ),
        ({"image": png(), "mask": png((8, 8))}, "the mask has 8x8 pixels and the image 16x16"),
        ({"image": png(), "mask": png(colour=0)}, "it marks nothing: make transparent what is to change"),
        ({"image": png(), "mask": b"x"}, "mask cannot be read as an image"),
        ({"mask": png()}, "no image is sent"),
        ({"image": png(), "image[]": png()}, "2 images are sent; fake draws from at most 1"),
        ({"image": png(), "seed": b"1"}, "seed is sent as a file; only image, image[] and mask are files"),
    ],
)
def test_images_that_cannot_be_used_are_refused_in_words(
    plain: Served, files: dict[str, bytes], message: str
) -> None:
    answer = plain.edit(files=files)
    assert answer.status == 400
    assert message in answer.message
    assert blue(plain.edit(files={"image": png()})) == 7, "the next request is right"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "https://example.com/a.png"}, "image is text; send it as a file. URLs are not fetched"),
        ({"strength": 0}, "strength: Input should be greater than 0"),
        ({"strength": "x"}, "strength: Value error, give a number"),
        ({"strength": 0.1, "num_inference_steps": 4}, "0.1 of 4 steps runs none of them; give 0.25 or more"),
        ({"style": "vivid"}, "style is not a parameter here; there are: prompt, model, n, size"),
        ({"n": "1_0"}, "n: Value error, give a number"),
        ({"loras": "{"}, "loras: Value error, give JSON, e.g. [{"),
        ({"loras": '[{"name": "x"}]'}, "no LoRA 'x'; there are: none"),
        ({"seed": "NaN"}, "seed: Input should be a valid integer"),
        ({"stream": "yes"}, "stream: Value error, give true or false"),
    ],
)
def test_fields_that_are_not_served_are_refused_in_words(
    plain: Served, fields: dict[str, Any], message: str
) -> None:
    files = {} if "image" in fields else {"image": png()}
    answer = plain.edit(**{"prompt": "x", "files": files, **fields})
    assert answer.status == 400
    assert message in answer.message


def test_forms_that_are_none_or_too_large_are_refused(plain: Served) -> None:
    assert plain.send(EDITS, {"prompt": "x"}).status == 400
    kind = {"content-type": "multipart/form-data; boundary=limit"}
    assert plain.send(EDITS, b"no parts", kind).status == 400
    assert plain.send(EDITS, b"--limit\r\n\r\n", {"content-type": "multipart/form-data"}).status == 400
    answer = plain.send(EDITS, b"x" * (LARGEST_UPLOAD + 1), kind)
    assert (answer.status, answer.message) == (413, "a body has at most 32,000,000 bytes")
    many = plain.edit(**{f"field{number}": 1 for number in range(99)})
    assert many.status == 400


def test_each_kind_of_image_is_read_as_it_looks(plain: Served) -> None:
    turned = halves((0, 0, 0), (9, 0, 0))
    orientation = Image.Exif()
    orientation[0x0112] = 3  # upside down: the right half comes first
    sixteen = Image.fromarray(np.full((16, 16), 65535, dtype=np.uint16))
    palette = Image.new("RGB", (16, 16), (5, 0, 0)).quantize(2)
    kinds = {
        "EXIF": (encoded(turned, "PNG", exif=orientation), 9),
        "16 bit": (encoded(sixteen), 255),
        "palette": (encoded(palette), 5),
        "grey": (png(mode="L", colour=8), 8),
        "JPEG": (encoded(Image.new("RGB", (16, 16), (254, 0, 0)), "JPEG"), 254),
        "CMYK": (encoded(Image.new("CMYK", (16, 16), (0, 0, 0, 255)), "JPEG"), 0),
        "transparent": (png(mode="RGBA", colour=(3, 0, 0, 0)), 255),
    }
    for name, (data, expected) in kinds.items():
        answer = plain.edit(files={"image": data})
        assert blue(answer) == expected, name
        assert ("notes" in answer.json) is (name == "transparent")
    assert "transparent pixels, which are put on white" in answer.json["notes"][0]


def test_what_is_cut_off_is_said(plain: Served) -> None:
    answer = plain.edit(files={"image": png((200, 100))})
    assert answer.json["size"] == "64x64"
    (note,) = answer.json["notes"]
    assert note == "the image: 200x100 pixels fitted to 64x64, cutting 50% off at left and right"


def test_openais_client_edits_and_streams(plain: Served) -> None:
    client = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)
    mask = encoded(halves((0, 0, 0, 255), (0, 0, 0, 0), "RGBA"))
    made = client.images.edit(
        model="fake",
        image=("a.png", png()),
        mask=("mask.png", mask),
        prompt="x",
        n=2,
        extra_body={"seed": 5, "strength": 0.5},
    )
    assert made.data is not None
    assert [image_of(entry.b64_json or "").getpixel((0, 0)) for entry in made.data] == [(7, 0, 0)] * 2, (
        "outside of the mask"
    )
    stream = client.images.edit(
        model="fake",
        image=[("a.png", png())],
        prompt="x",
        stream=True,
        partial_images=1,
        extra_body={"seed": 9},
    )
    events = list(stream)
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert image_of(events[-1].b64_json).getpixel((0, 0)) == (9, 0, 7)
    with pytest.raises(openai.BadRequestError, match="it has 9000x9000 pixels"):
        client.images.edit(image=("a.png", bomb(9_000)), prompt="x")


def test_an_image_is_drawn_at_the_nearest_size() -> None:
    speeds = {Size(*size): StepTimes(1, 1) for size in ((512, 512), (1024, 1024), (832, 1216), (1216, 832))}
    state = ModelState("m", "r", "cpu", 4, None, Size(1024, 1024), 16, frozenset(), None, speeds, False)
    settings = ServeSettings(model="m", recipe="r")
    assert nearest_size(Size(500, 500), settings, state) == Size(512, 512)
    assert nearest_size(Size(4000, 4000), settings, state) == Size(1024, 1024)
    assert nearest_size(Size(1000, 1500), settings, state) == Size(832, 1216)
    any_size = ServeSettings(model="m", recipe="r", any_size=True)
    assert nearest_size(Size(700, 500), any_size, state) == Size(704, 496)
    assert nearest_size(Size(4000, 3000), any_size, state) == Size(1184, 880)
    assert nearest_size(Size(16_000, 10), any_size, state) == Size(1216, 832), "no such strip is drawn"
