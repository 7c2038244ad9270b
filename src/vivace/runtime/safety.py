"""Images that a model's safety checker replaced by black ones. diffusers reports them only in a field of its output."""

from __future__ import annotations

import warnings
from typing import Any


class HiddenImageWarning(UserWarning):
    """A model's safety checker replaced an image by a black one."""


def hidden_images(output: Any) -> tuple[bool, ...]:
    """Return for each image of a call's answer whether a safety checker replaced it; empty without a checker.

    Args:
        output: what a pipeline of diffusers returns: its output class, or a tuple of images and flags.
    """
    flags = getattr(output, "nsfw_content_detected", None) or getattr(output, "nsfw_detected", None)
    if isinstance(output, tuple) and len(output) > 1:
        flags = output[1]
    return tuple(bool(flag) for flag in flags) if isinstance(flags, list) else ()


def warn_of_hidden(output: Any) -> None:
    """Warn if a safety checker replaced images of a call's answer, and say which."""
    hidden = hidden_images(output)
    if any(hidden):
        which = ", ".join(str(index) for index, is_hidden in enumerate(hidden) if is_hidden)
        text = (
            f"the model's safety checker replaced {sum(hidden)} of {len(hidden)} images of this call by black ones "
            f"(from 0: {which})"
        )
        warnings.warn(text, HiddenImageWarning, stacklevel=3)
