"""PNG files of our own: the pixels that went in, by Pillow's reader, at every size; small and quick."""

import io
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from benchmarks.encoding import natural_image
from vivace.serve.png import encode_png

SIZES = [(1, 1), (1, 300), (300, 1), (7, 5), (64, 127), (64, 128), (33, 129), (96, 64), (100, 1000)]


def decoded(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    image.verify()  # reads the checksums
    read = Image.open(io.BytesIO(data))
    assert (read.format, read.mode) == ("PNG", "RGB")
    return np.asarray(read)


@pytest.mark.parametrize("kind", ["noise", "flat", "steps"])
@pytest.mark.parametrize("size", SIZES)
def test_every_pixel_is_as_it_was(size: tuple[int, int], kind: str) -> None:
    width, height = size
    shape = (height, width, 3)
    pixels = {
        "noise": np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8),
        "flat": np.full(shape, 200, np.uint8),
        "steps": np.resize(np.array([0, 255, 1, 254], np.uint8), shape),
    }[kind]
    assert np.array_equal(decoded(encode_png(pixels.tobytes(), width, height)), pixels)


def test_files_of_natural_images_are_no_larger_than_pillows_and_made_faster() -> None:
    image = natural_image(512)
    began = time.process_time()
    ours = encode_png(image.tobytes(), *image.size)
    ours_s = time.process_time() - began
    file = io.BytesIO()
    began = time.process_time()
    image.save(file, "PNG", compress_level=4)
    pillow_s = time.process_time() - began
    assert len(ours) < 1.01 * len(file.getvalue())
    assert ours_s < 0.7 * pillow_s, "of all threads together"


def test_what_is_flat_takes_next_to_nothing() -> None:
    data = encode_png(bytes([9, 80, 250]) * (512 * 512), 512, 512)
    assert len(data) < 8_000


def test_a_changed_byte_is_noticed() -> None:
    data = bytearray(encode_png(bytes(range(192)), 8, 8))
    data[50] ^= 1
    with pytest.raises((SyntaxError, OSError, zlib.error)):
        decoded(bytes(data))
