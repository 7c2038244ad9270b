"""Damage done to images and weights without any recipe, to test the quality gate on what no limit was fitted to.

What each does is in `tinyworld.damaged`, a file for each kind.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import ndimage

from tinyworld.damaged import colours, contents, details, places
from tinyworld.damaged.pictures import Pictures, as_bytes
from tinyworld.damaged.weights import WEIGHTS, spoil

__all__ = ["IMAGE", "LATER_IMAGE", "NEWEST_IMAGE", "WEIGHTS", "Damage", "Pictures", "spoil"]

Damage = Callable[[Pictures, Sequence[str]], Pictures]

IMAGE: dict[str, dict[str, Damage]] = {
    "gray": {"gray": lambda images, prompts: colours.gray(images)},
    "hue": {
        **{
            f"hue {d} degrees": lambda images, prompts, d=d: colours.turned(images, d) for d in (60, 120, 180)
        },
        "hue 3 degrees": lambda images, prompts: colours.turned(images, 3),
    },
    "channels": {
        "red and blue exchanged": lambda images, prompts: images[..., ::-1],
        "red and green exchanged": lambda images, prompts: images[..., [1, 0, 2]],
    },
    "mirror": {
        "left and right exchanged": lambda images, prompts: images[:, :, ::-1],
        "upside down": lambda images, prompts: images[:, ::-1],
    },
    "shift": {
        "shift by 32 pixels": lambda images, prompts: places.shifted(images, 32),
        "shift by 1 pixel": lambda images, prompts: places.shifted(images, 1),
        "shift by 1 pixel up and left": lambda images, prompts: places.shifted(images, -1, -1),
    },
    "blur": {
        "blur of 6 pixels": lambda images, prompts: details.blurred(images, 6),
        "blur of 4 pixels": lambda images, prompts: details.blurred(images, 4),
        "blur of 0.5 pixels": lambda images, prompts: details.blurred(images, 0.5),
    },
    "object": {"the smaller object gone": lambda images, prompts: contents.without_the_smaller(images)},
    "jpeg": {
        "JPEG 90": lambda images, prompts: details.encoded(images, "JPEG", 90),
        "JPEG 75": lambda images, prompts: details.encoded(images, "JPEG", 75),
        "JPEG 5": lambda images, prompts: details.encoded(images, "JPEG", 5),
    },
    "pixel noise": {
        "noise of 3 levels": lambda images, prompts: details.noisy(images, 3),
        "noise of 60 levels": lambda images, prompts: details.noisy(images, 60),
    },
    "brightness": {
        "2 % brighter": lambda images, prompts: as_bytes(images * 1.02),
        "negative": lambda images, prompts: 255 - images,
    },
    "one prompt": {
        "one prompt of thirteen": lambda images, prompts: contents.of_other_prompts(
            images, prompts, lambda k: k % 13 == 7
        )
    },
    "half": {"half of the images of other prompts": contents.half_of_other_prompts},
    "prompts": {
        "every third prompt of others": lambda images, prompts: contents.of_other_prompts(
            images, prompts, lambda k: k % 3 == 0
        ),
        "all of other prompts": lambda images, prompts: contents.of_other_prompts(
            images, prompts, lambda k: True
        ),
    },
}
"""Damage of images, and changes that harm nothing, by kind and name."""

LATER_IMAGE: dict[str, dict[str, Damage]] = {
    "contrast": {
        "half of the contrast": lambda images, prompts: colours.toned(images, contrast=0.5),
        "95 % of the contrast": lambda images, prompts: colours.toned(images, contrast=0.95),
    },
    "saturation": {
        "30 % of the saturation": lambda images, prompts: colours.toned(images, saturation=0.3),
        "95 % of the saturation": lambda images, prompts: colours.toned(images, saturation=0.95),
    },
    "gamma": {
        "gamma 1.05": lambda images, prompts: colours.toned(images, gamma=1.05),
        "gamma 4": lambda images, prompts: colours.toned(images, gamma=4),
    },
    "pixelation": {
        "squares of 2 pixels": lambda images, prompts: details.pixelated(images, 2),
        "squares of 8 pixels": lambda images, prompts: details.pixelated(images, 8),
        "squares of 16 pixels": lambda images, prompts: details.pixelated(images, 16),
    },
    "rotation": {
        "rotation by 0.5 degrees": lambda images, prompts: places.rotated(images, 0.5),
        "rotation by 45 degrees": lambda images, prompts: places.rotated(images, 45),
        "rotation by 90 degrees": lambda images, prompts: places.rotated(images, 90),
    },
    "enlargement": {
        "enlarged 1.02 times": lambda images, prompts: places.enlarged(images, 1.02),
        "enlarged 2 times": lambda images, prompts: places.enlarged(images, 2),
    },
    "cover": {
        "a gray band of 40 pixels": lambda images, prompts: contents.covered(images, 44, 84, 128),
        "the upper half gray": lambda images, prompts: contents.covered(images, 0, 64, 128),
    },
    "few colours": {
        "32 levels": lambda images, prompts: colours.posterised(images, 32),
        "2 levels": lambda images, prompts: colours.posterised(images, 2),
    },
    "speckles": {
        "10 % of the pixels black or white": lambda images, prompts: details.speckled(images, 0.1),
    },
    "fringes": {
        "colours 8 pixels apart": lambda images, prompts: colours.fringed(images, 8),
    },
}
"""The same, of kinds that were added after the gate's rules were settled."""

NEWEST_IMAGE: dict[str, dict[str, Damage]] = {
    "stretch": {
        "stretched 1.03 times": lambda images, prompts: places.warped(images, ((1, 0), (0, 1 / 1.03))),
        "stretched 3 times": lambda images, prompts: places.warped(images, ((1, 0), (0, 1 / 3))),
    },
    "reduction": {
        "reduced 0.98 times": lambda images, prompts: places.warped(images, ((1 / 0.98, 0), (0, 1 / 0.98))),
        "reduced 0.3 times": lambda images, prompts: places.warped(images, ((1 / 0.3, 0), (0, 1 / 0.3))),
    },
    "shear": {
        "sheared by 2 %": lambda images, prompts: places.warped(images, ((1, 0), (0.02, 1))),
        "sheared by 150 %": lambda images, prompts: places.warped(images, ((1, 0), (1.5, 1))),
    },
    "resampling": {
        "96 pixels and back": lambda images, prompts: details.resampled(images, 96),
        "10 pixels and back": lambda images, prompts: details.resampled(images, 10),
    },
    "waves": {
        "waves of 1 pixel": lambda images, prompts: places.waved(images, 1),
        "waves of 16 pixels": lambda images, prompts: places.waved(images, 16),
    },
    "vignette": {
        "corners 5 % darker": lambda images, prompts: colours.vignetted(images, 0.05),
        "corners dark": lambda images, prompts: colours.vignetted(images, 2),
    },
    "colour temperature": {
        "3 % warmer": lambda images, prompts: as_bytes(images * np.array([1.02, 1.0, 0.98])),
        "red light": lambda images, prompts: as_bytes(images * np.array([1.0, 0.2, 0.2])),
    },
    "median": {
        "median of 3 pixels": lambda images, prompts: ndimage.median_filter(images, (1, 3, 3, 1)),
        "median of 31 pixels": lambda images, prompts: ndimage.median_filter(images, (1, 31, 31, 1)),
    },
    "webp": {
        "WebP 95": lambda images, prompts: details.encoded(images, "WEBP", 95),
        "WebP 0": lambda images, prompts: details.encoded(images, "WEBP", 0),
    },
    "sharpening": {
        "sharpened by a half": lambda images, prompts: details.sharpened(images, 0.5),
        "sharpened 20 times": lambda images, prompts: details.sharpened(images, 20),
    },
    "double exposure": {
        "2 % of the next picture": lambda images, prompts: contents.mixed(images, 0.02),
        "half of the next picture": lambda images, prompts: contents.mixed(images, 0.5),
    },
    "quarters": {"quarters exchanged": lambda images, prompts: places.tiles_exchanged(images)},
}
"""The same, of kinds that were added after the scorer averaged over zooms; made and judged once."""
