"""Images of numbers that are not finite, or of one colour. Conversion to bytes makes NaN 0, and decoders clamp
infinity, so numbers are looked at before: latents on their way into the VAE, decoded tensors on their way into the
converter."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vivace.errors import NotFinite


class FiniteCheck:
    """Whether all numbers of a call's images are finite. A GPU's answer is waited for only when it is asked for."""

    def __init__(self) -> None:
        self._flags: list[Any] = []

    @property
    def flag(self) -> Any:
        """A tensor of one truth value, on the device of the images; None if all were in the CPU's memory."""
        import torch

        return (
            torch.stack([flag.to(self._flags[-1].device) for flag in self._flags]).all()
            if self._flags
            else None
        )

    def look(self, values: Any) -> None:
        """Look at an array, a tensor, or a list of them; whatever else is no number yet."""
        import numpy as np
        import torch

        if isinstance(values, list | tuple):
            for each in values:
                self.look(each)
        elif isinstance(values, np.ndarray):
            self.refuse(np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all())
        elif isinstance(values, torch.Tensor) and values.device.type != "meta":
            is_finite = torch.isfinite(values).all()
            if values.device.type == "cpu":
                self.refuse(not is_finite.numpy())  # an `item` would count as a wait in a profile
            else:
                self._flags.append(is_finite)

    def refuse(self, is_wrong: Any = None) -> None:
        """Raise NotFinite if this is so; without an argument if any number looked at on a GPU was not finite."""
        if is_wrong is None:
            is_wrong = self._flags and not self.flag
        if is_wrong:
            raise NotFinite(
                "the image is not finite: its numbers are NaN or infinity, so it would be black. The model's weights "
                "or a LoRA's hold such numbers, or overflow: give a smaller LoRA scale, or a recipe without fp16 and "
                "quantize; if `baseline` does the same, the files are damaged"
            )

    @contextmanager
    def watching(self, pipe: Any) -> Iterator[None]:
        """Look at what a pipeline's call decodes and converts. The instance is patched meanwhile."""
        places = ((getattr(pipe, "vae", None), "decode"), (getattr(pipe, "image_processor", None), "postprocess"),
                  (pipe, "numpy_to_pil"))  # fmt: skip
        with ExitStack() as stack:
            for owner, name in places:
                if hasattr(owner, name):
                    stack.enter_context(_patched(owner, name, self._looking(getattr(owner, name))))
            yield

    def _looking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def look_and_call(*args: Any, **kwargs: Any) -> Any:
            self.look(args[0] if args else next(iter(kwargs.values()), None))
            return function(*args, **kwargs)

        return look_and_call


@contextmanager
def _patched(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


HIDDEN = "black: the model's safety checker replaced the image"
ONE_COLOUR = "of one colour: all pixels are equal in the image"


class EmptyImageWarning(UserWarning):
    """An image of a call shows nothing."""


class HiddenImageWarning(EmptyImageWarning):
    """A model's safety checker replaced an image by a black one. diffusers reports it only in a field of its output."""


def hidden_images(output: Any) -> tuple[bool, ...]:
    """Return for each image of a call's answer whether a safety checker replaced it; empty without a checker."""
    flags = getattr(output, "nsfw_content_detected", None) or getattr(output, "nsfw_detected", None)
    if isinstance(output, tuple) and len(output) > 1:
        flags = output[1]
    return tuple(bool(flag) for flag in flags) if isinstance(flags, list) else ()


_APART = 61
"""Of pixels that are looked at first: nearly always one differs, and all of an image of 1024 px take 8 ms."""


def has_one_colour(image: Any) -> bool:
    """Return whether all pixels of a PIL image, or of an array (rows, columns, colours), are equal."""
    if hasattr(image, "getextrema"):
        places = itertools.product(range(0, image.width, _APART), range(0, image.height, _APART))
        first = image.getpixel((0, 0))
        if any(image.getpixel(place) != first for place in places):
            return False
        extrema = image.getextrema()
        bands = extrema if isinstance(extrema[0], tuple) else (extrema,)
        return all(low == high for low, high in bands)
    few = image[::_APART, ::_APART]
    return bool((few == few[:1, :1]).all() and (image == image[:1, :1]).all())


def why_empty(output: Any) -> list[str]:
    """Return for each image of a call's answer what is wrong with it if it shows nothing, else "". PIL images are
    looked at. The texts complete "FILE is ..." and are followed by "of ..."."""
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
