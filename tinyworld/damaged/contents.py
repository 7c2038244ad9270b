"""Damage to what is shown: objects and prompts."""

from collections.abc import Callable, Sequence

import numpy as np

from tinyworld import verifier
from tinyworld.damaged.pictures import Pictures, as_bytes


def without_the_smaller(pictures: Pictures) -> Pictures:
    """Paint the background over the smaller of two objects; other images stay as they are."""

    def without(picture: Pictures) -> Pictures:
        things = verifier.objects(picture)
        return verifier.without(picture, things[-1][1]) if len(things) == 2 else picture

    return np.stack([without(picture) for picture in pictures])


def of_other_prompts(pictures: Pictures, prompts: Sequence[str], lost: Callable[[int], bool]) -> Pictures:
    """Replace the images of some prompts by those of the next prompt.

    Args:
        lost: whether the prompt with this number loses its images.
    """
    number = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    out = pictures.copy()
    for k, prompt in enumerate(prompts):
        if lost(number[prompt]):
            out[k] = pictures[(k + 1) % len(pictures)]
    return out


def half_of_other_prompts(pictures: Pictures, prompts: Sequence[str]) -> Pictures:
    """Replace every second image by that of the next prompt."""
    out = pictures.copy()
    out[::2] = np.roll(pictures, -1, axis=0)[::2]
    return out


def covered(pictures: Pictures, top: int, bottom: int, right: int) -> Pictures:
    """Paint rows `top` to `bottom` gray, up to the column `right`."""
    out = pictures.copy()
    out[:, top:bottom, :right] = 128
    return out


def mixed(pictures: Pictures, share: float) -> Pictures:
    """Let the next picture shine through."""
    return as_bytes((1 - share) * pictures + share * np.roll(pictures, -1, axis=0))
