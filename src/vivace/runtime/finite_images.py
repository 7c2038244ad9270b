"""Images of numbers that are not finite: they would become black ones, without a word.

Conversion to bytes makes NaN 0, and decoders and converters clamp infinity, so the numbers are looked at before:
latents on their way into the VAE, and decoded tensors on their way into the converter.
"""

from __future__ import annotations

import functools
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
        """Look at an array, a tensor, or a list of them; whatever else is no number yet.

        Raises:
            NotFinite: at once for values in the CPU's memory.
        """
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
