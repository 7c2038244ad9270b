"""What was done to images is named; noise, and other images of the same prompts, are not called anything."""

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vivace.measure.damage.details import blurred, resized
from vivace.measure.image_metrics import luminance, match, pixels
from vivace.proofs.alterations import altered
from vivace.proofs.image_findings import ImageFinding
from vivace.proofs.pair_figures import PairFigures
from vivace.proofs.patterns import fixed, patterns, seams
from vivace.proofs.proof_store import KeptImage
from vivace.proofs.same import OwnDistances

Pixels = NDArray[np.float64]
OWN = OwnDistances(({"psnr_db": np.inf, "match": 1.0},), ({"psnr_db": 12.0, "match": -0.5},))
SIDE = 96
NUM_PAIRS = 12
FIXED_NOISE = np.random.default_rng(7).normal(0, 3, (SIDE, SIDE, 1))


def scene(seed: int) -> Pixels:
    """Return an image with details of every size, as photographs have."""
    random = np.random.default_rng(seed)
    image = np.full((SIDE, SIDE, 3), 128.0)
    for cells, levels in ((3, 60), (12, 30), (48, 12), (SIDE, 2)):
        image += resized(random.normal(0, levels, (cells, cells, 3)), SIDE, SIDE)
    return image.round().clip(0, 255)


def compared(change: Callable[[Pixels, int], Pixels]) -> list[ImageFinding]:
    pairs = []
    for seed in range(NUM_PAIRS):
        a = scene(seed)
        b = change(a, seed).round().clip(0, 255)
        error = float(((a - b) ** 2).mean())
        against = {"psnr_db": 10 * np.log10(255**2 / error) if error else np.inf, "match": match(b, a)}
        images = [
            SimpleNamespace(pixels=image, size=(SIDE, SIDE), faults=(), kept=KeptImage(None))
            for image in (a, b)
        ]
        pair: Any = SimpleNamespace(
            label=f"image {seed}", against=against, a=images[0], b=images[1], is_complete=True
        )
        pairs.append(cast(PairFigures, pair))

    def request_of(pair: PairFigures) -> str:
        return ""

    return (
        patterns(pairs, request_of)
        or altered(pairs, OWN, request_of)
        or fixed(pairs, request_of)
        or seams(pairs, OWN, request_of)
    )


def encoded(image: Pixels, seed: int) -> Pixels:
    file = io.BytesIO()
    Image.fromarray(image.astype(np.uint8)).save(file, "JPEG", quality=85)
    return pixels(Image.open(file))


def marked(image: Pixels, seed: int) -> Pixels:
    image = image.copy()
    image[-12:-4, -30:-6] = 255 - image[-12:-4, -30:-6]
    return image


def zoomed(image: Pixels, seed: int) -> Pixels:
    picture = Image.fromarray(image.astype(np.uint8))
    return pixels(picture.crop((2, 2, SIDE - 2, SIDE - 2)).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def grey_by(image: Pixels, share: float) -> Pixels:
    light = luminance(image)[..., None]
    return light + (1 - share) * (image - light)


def of_a_palette(image: Pixels, seed: int) -> Pixels:
    return pixels(Image.fromarray(image.astype(np.uint8)).quantize(64).convert("RGB"))


def with_red_moved(image: Pixels, seed: int) -> Pixels:
    image = image.copy()
    image[..., 0] = np.roll(image[..., 0], 1, axis=1)
    return image


def faintly_marked(image: Pixels, seed: int) -> Pixels:
    image = image.copy()
    image[-12:-4, -30:-6] += 4
    return image


def tiled(image: Pixels, seed: int) -> Pixels:
    image = image.copy()
    image[:, 48:] += 12
    return image


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda image, seed: image[..., ::-1], "red and blue are swapped"),
        (lambda image, seed: image[::-1], "they are upside down"),
        (lambda image, seed: image[:, ::-1], "they are mirrored"),
        (lambda image, seed: np.roll(image, 3, axis=1), "moved by 3 pixels right"),
        (lambda image, seed: 255 * (image / 255) ** 1.1, "tones have a gamma of 1.10"),
        (lambda image, seed: 255 * (image / 255) ** 0.45, "as of sRGB that is encoded twice"),
        (lambda image, seed: 0.9 * image + 13, "tones are stretched by 0.90 and moved by +13 levels"),
        (lambda image, seed: blurred(image, 0.6), "they are softened"),
        (lambda image, seed: 2 * image - blurred(image, 0.8), "they are sharpened"),
        (encoded, "encoded as JPEG (quality 85)"),
        (lambda image, seed: image // 4 * 4, "64 levels of each colour"),
        (marked, "the difference is at one place, bottom right, as of a watermark"),
        (faintly_marked, "the difference is at one place, bottom right, as of a watermark"),
        (of_a_palette, "at most 64 colours in an image"),
        (with_red_moved, "red is moved by 1 pixel right"),
        (zoomed, "enlarged by 4.0 %"),
        (lambda image, seed: grey_by(image, 0.1), "their saturation is 90 % of A's"),
        (lambda image, seed: image + np.array((5, 0, -5)), "+5 (red), +0 (green) and -5 (blue) levels"),
        (lambda image, seed: image // 2 * 2, "128 levels of each colour"),
        (lambda image, seed: image + FIXED_NOISE, "the same is added to every image, 2.9 levels strong"),
        (tiled, "seams at column 48"),
        (lambda image, seed: image + 3 * (-1.0) ** np.indices(image.shape)[:2].sum(axis=0), "a checkerboard"),
    ],
)
def test_what_was_done_to_every_image_is_named(change: Callable[[Pixels, int], Pixels], words: str) -> None:
    (finding,) = compared(change)
    assert words in finding.text


@pytest.mark.parametrize(
    "change",
    [
        lambda image, seed: image,
        lambda image, seed: scene(seed + 1000),
        lambda image, seed: image + np.random.default_rng(seed).normal(0, 2, image.shape),
        lambda image, seed: (
            image + resized(np.random.default_rng(seed).normal(0, 8, (13, 13, 3)), SIDE, SIDE)
        ),
        lambda image, seed: image * np.random.default_rng(seed).uniform(0.98, 1.02),
    ],
    ids=["equal", "another seed", "noise", "rounded latents", "slightly other light"],
)
def test_other_images_and_rounding_are_called_nothing(change: Callable[[Pixels, int], Pixels]) -> None:
    assert compared(change) == []
