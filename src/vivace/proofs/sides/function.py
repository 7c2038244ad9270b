"""A Python function as a source of images: `draw(prompt, seed, ...)`."""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vivace.errors import UsageError
from vivace.foundation.untrusted.reading import reason
from vivace.proofs.sides.drawing import SETTINGS, DrawingFailed, DrawnImage, Settings, as_png, suffix_of
from vivace.proofs.sides.sides import FunctionSide


class Function:
    """A function that returns an image.

    It is called with the keywords `prompt` and `seed`, and with those of height, width, num_inference_steps and
    guidance_scale that it takes and that have a value. It returns a PIL image, an array (H, W, 3) of uint8 or of floats
    in 0 .. 1, the bytes of an image file, or diffusers' output.

    Raises:
        UsageError: there is no such function, or it takes no prompt and seed.
    """

    def __init__(self, side: FunctionSide) -> None:
        self._function = _imported(side)
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError):
            raise UsageError(f"{side.text}: it has no signature; give a function of Python") from None
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [name for name in ("prompt", "seed") if name not in parameters and not takes_any]
        if missing:
            raise UsageError(
                f"{side.text}: it takes no {' and no '.join(missing)}; define def {side.function}(prompt, seed)"
            )
        self.settings = [name for name in SETTINGS if takes_any or name in parameters]

    def __enter__(self) -> Function:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image; see `Drawer.draw`."""
        call = {name: value for name, value in settings.call.items() if name in self.settings}
        began = time.monotonic()
        try:
            output = self._function(prompt=prompt, seed=seed, **call)
        except Exception as error:  # the user's own code
            raise DrawingFailed(f"{type(error).__name__}: {reason(error)}") from error
        seconds = time.monotonic() - began
        if isinstance(output, bytes):
            return DrawnImage(output, suffix_of(output), seconds, settings=call)
        image, faults = _picture(output)
        return DrawnImage(as_png(image), ".png", seconds, faults, settings=call)


def _picture(output: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a function's result as a PIL image, and any loss in an image file.

    Raises:
        DrawingFailed: it is not an image.
    """
    import numpy as np
    from PIL import Image

    images = getattr(output, "images", output)
    if isinstance(images, list):
        if len(images) != 1:
            raise DrawingFailed(f"the function returned {len(images)} images; it must return one")
        images = images[0]
    if isinstance(images, Image.Image):
        return images, ()
    array = np.asarray(images)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype.kind not in "uif":
        raise DrawingFailed(
            f"the function returned {type(output).__name__}; it must return a PIL image, an array of shape "
            "(H, W, 3), or the bytes of an image file"
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array), ()
    faults = () if np.isfinite(array).all() else ("not finite",)
    finite = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return Image.fromarray(np.round(255 * finite.clip(0, 1)).astype(np.uint8)), faults


def _imported(side: FunctionSide) -> Callable[..., Any]:
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # as `python` itself does
    try:
        target: Any = importlib.import_module(side.module)
        for name in side.function.split("."):
            target = getattr(target, name)
    except Exception as error:  # the user's own code
        raise UsageError(
            f"{side.text} cannot be imported: {reason(error)}; run vivace in the folder of the module"
        ) from error
    if not callable(target):
        raise UsageError(f"{side.text} is not a function")
    return target  # type: ignore[no-any-return]
