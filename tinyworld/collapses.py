"""Ways to make images differ less from each other, by name: seeds, or prompts, lose their differences."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tinyworld import damage
from tinyworld.gate_variants import PROMPT_SET
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS

PROMPTS = PROMPT_SETS[PROMPT_SET]
Images = NDArray[np.uint8]
"""(N, H, W, 3), the prompts at the first seed, then at the second."""


def by_seed(images: Images) -> NDArray[np.float64]:
    """Return (seeds, prompts, H, W, 3)."""
    return images.reshape(NUM_SEEDS, len(PROMPTS), *images.shape[1:]).astype(np.float64)


def _images(values: NDArray[np.float64]) -> Images:
    flat = values.reshape(-1, *values.shape[2:])
    return np.rint(flat).clip(0, 255).astype(np.uint8)


def _first(images: Images) -> NDArray[np.float64]:
    """Return the images of the first seed in the place of all."""
    return np.repeat(by_seed(images)[:1], NUM_SEEDS, axis=0)


def _noisy(values: NDArray[np.float64], levels: float) -> NDArray[np.float64]:
    return values + np.random.default_rng(0).normal(0, levels, values.shape)


def _each(images: NDArray[np.float64], change: Callable[[Images, int], Images]) -> Images:
    """Change copies, each seed's in its own way."""
    return np.concatenate([change(_images(images[k : k + 1]), k) for k in range(NUM_SEEDS)])


def _some_prompts(images: Images, chosen: slice) -> Images:
    values = by_seed(images)
    values[:, chosen] = _first(images)[:, chosen]
    return _images(values)


def _two_modes(images: Images, levels: float = 0.0) -> Images:
    values = by_seed(images)
    values[2] = _noisy(values[0], levels)
    return _images(values)


def _enlarged(images: Images, times: float) -> Images:
    height, width = images.shape[1:3]
    size = (round(width * times), round(height * times))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    box = (left, top, left + width, top + height)
    return np.stack([np.asarray(Image.fromarray(image).resize(size).crop(box)) for image in images])


def _damaged(kind: str, name: str) -> Callable[[Images, int], Images]:
    """Return a change that leaves the first seed's images alone, damages the others', the last twice."""
    change = (damage.IMAGE | damage.LATER_IMAGE | damage.NEWEST_IMAGE)[kind][name]

    def changed(images: Images, seed: int) -> Images:
        for _ in range(seed):
            images = change(images, list(PROMPTS))
        return images

    return changed


CALIBRATED: dict[str, Callable[[Images], Images]] = {
    "all seeds equal": lambda images: _images(_first(images)),
    "equal, noise of 3 levels": lambda images: _images(_noisy(_first(images), 3)),
    "equal, noise of 8 levels": lambda images: _images(_noisy(_first(images), 8)),
    "equal, noise of 15 levels": lambda images: _images(_noisy(_first(images), 15)),
    "equal, 5 % darker or brighter": lambda images: _images(
        _first(images) * np.array([0.95, 1, 1.05])[:, None, None, None, None]
    ),
    "equal, moved by 2 pixels": lambda images: _each(
        _first(images), lambda copy, k: np.roll(copy, (0, 2, -2)[k], axis=2)
    ),
    "equal, moved by 4 pixels": lambda images: _each(
        _first(images), lambda copy, k: np.roll(copy, (0, 4, -4)[k], axis=2)
    ),
    "two modes": _two_modes,
    "two modes, noise of 5 levels": lambda images: _two_modes(images, 5),
    "equal for half of the prompts": lambda images: _some_prompts(images, slice(0, None, 2)),
    "equal for four prompts": lambda images: _some_prompts(images, slice(0, 4)),
    "half way to one image": lambda images: _images((by_seed(images) + _first(images)) / 2),
}
HELD_OUT: dict[str, Callable[[Images], Images]] = {
    "equal, JPEG": lambda images: _each(_first(images), _damaged("jpeg", "JPEG 90")),
    "equal, blur": lambda images: _each(_first(images), _damaged("blur", "blur of 0.5 pixels")),
    "equal, hue turned": lambda images: _each(_first(images), _damaged("hue", "hue 3 degrees")),
    "equal, moved by 1 pixel": lambda images: _each(_first(images), _damaged("shift", "shift by 1 pixel")),
    "equal, enlarged 1.03 times a seed": lambda images: _each(
        _first(images), lambda copy, k: _enlarged(copy, 1.03**k)
    ),
    "equal, contrast of 90 % a seed": lambda images: _each(
        _first(images), lambda copy, k: np.rint(128 + (copy - 128.0) * 0.9**k).astype(np.uint8)
    ),
    "equal, tinted": lambda images: _images(
        _first(images) + np.array([[0, 0, 0], [12, 0, -6], [-8, 8, 0]])[:, None, None, None]
    ),
    "two modes, moved by 2 pixels": lambda images: _images(
        np.concatenate([by_seed(images)[:2], np.roll(by_seed(images)[:1], 2, axis=3)])
    ),
    "equal for three prompts": lambda images: _some_prompts(images, slice(5, 8)),
    "equal for one prompt": lambda images: _some_prompts(images, slice(1, 2)),
    "two thirds of the way to one image": lambda images: _images((by_seed(images) + 2 * _first(images)) / 3),
    "all prompts one image": lambda images: np.repeat(images[:1], len(images), axis=0),
    "all prompts one image a seed": lambda images: _images(
        np.repeat(by_seed(images)[:, :1], len(PROMPTS), axis=1)
    ),
    "all prompts one of three images": lambda images: _images(
        by_seed(images)[:, np.arange(len(PROMPTS)) % 3]
    ),
}
