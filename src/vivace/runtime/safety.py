"""Images that show nothing: black ones that a model's safety checker put in their place, and those of one colour."""

from __future__ import annotations

import warnings
from typing import Any

HIDDEN = "black: the model's safety checker replaced the image"
ONE_COLOUR = "of one colour: all pixels are equal in the image"


class EmptyImageWarning(UserWarning):
    """An image of a call shows nothing."""


class HiddenImageWarning(EmptyImageWarning):
    """A model's safety checker replaced an image by a black one. diffusers reports it only in a field of its output."""


def hidden_images(output: Any) -> tuple[bool, ...]:
    """Return for each image of a call's answer whether a safety checker replaced it; empty without a checker.

    Args:
        output: what a pipeline of diffusers returns: its output class, or a tuple of images and flags.
    """
    flags = getattr(output, "nsfw_content_detected", None) or getattr(output, "nsfw_detected", None)
    if isinstance(output, tuple) and len(output) > 1:
        flags = output[1]
    return tuple(bool(flag) for flag in flags) if isinstance(flags, list) else ()


def has_one_colour(image: Any) -> bool:
    """Return whether all pixels of a PIL image, or of an array (rows, columns, colours), are equal."""
    if hasattr(image, "getextrema"):
        extrema = image.getextrema()
        bands = extrema if isinstance(extrema[0], tuple) else (extrema,)
        return all(low == high for low, high in bands)
    return bool((image == image[:1, :1]).all())


def why_empty(output: Any) -> list[str]:
    """Return for each image of a call's answer what is wrong with it if it shows nothing, else "".

    PIL images are looked at. The texts complete "FILE is ..." and are followed by "of ...".
    """
    images = output[0] if isinstance(output, tuple) else getattr(output, "images", None)
    hidden = hidden_images(output)
    if not isinstance(images, list):
        return [HIDDEN if is_hidden else "" for is_hidden in hidden]
    return [
        HIDDEN
        if any(hidden[k : k + 1])
        else ONE_COLOUR
        if hasattr(image, "getextrema") and has_one_colour(image)
        else ""
        for k, image in enumerate(images)
    ]


def warn_of_empty(output: Any) -> None:
    """Warn if images of a call's answer show nothing, and say which."""
    reasons = why_empty(output)
    kinds = {HIDDEN: HiddenImageWarning, ONE_COLOUR: EmptyImageWarning}
    says = {
        HIDDEN: "the model's safety checker replaced {} of {} images of this call by black ones",
        ONE_COLOUR: "{} of {} images of this call have one colour only",
    }
    for reason in sorted(set(reasons) - {""}):
        which = ", ".join(str(index) for index, each in enumerate(reasons) if each == reason)
        text = says[reason].format(reasons.count(reason), len(reasons))
        warnings.warn(f"{text} (from 0: {which})", kinds[reason], stacklevel=4)
