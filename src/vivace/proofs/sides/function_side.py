"""A Python function as a side of a proof: `draw(prompt, seed, ...)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import UsageError
from vivace.foundation.untrusted.files import reason
from vivace.proofs.sides.proof_store import file_digest
from vivace.proofs.sides.side import (
    SETTINGS,
    DrawingFailure,
    DrawJob,
    DrawnImage,
    Side,
    as_png,
    suffix_of,
)

if TYPE_CHECKING:
    from vivace.proofs.sides.plan import ProofPlan

_PYTHON = "python:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class FunctionSide(Side):
    """python:MODULE:FUNCTION.

    It is called with the keywords `prompt` and `seed`, and with those of height, width, num_inference_steps and
    guidance_scale that it takes and that have a value. It returns a PIL image, an array (H, W, 3) of uint8 or of floats
    in 0 .. 1, the bytes of an image file, or diffusers' output.
    """

    text: str
    module: str
    function: str

    @staticmethod
    def is_written(text: str) -> bool:
        return text.lower().startswith(_PYTHON)

    @classmethod
    def parse(cls, text: str) -> FunctionSide:
        target = text[len(_PYTHON) :]
        if not _FUNCTION.fullmatch(target):
            raise UsageError(f"{text[:200]}: give python:MODULE:FUNCTION, e.g. python:my_model:draw")
        module, _, function = target.partition(":")
        return cls(text, module, function)

    @property
    def identity(self) -> str:
        spec = importlib.util.find_spec(self.module)
        return self.text + (file_digest(Path(spec.origin)) if spec is not None and spec.origin else "")

    @cached_property
    def call(self) -> Callable[..., Any]:
        if "" not in sys.path and "." not in sys.path:
            sys.path.insert(0, "")  # as `python` itself does
        try:
            target: Any = importlib.import_module(self.module)
            for name in self.function.split("."):
                target = getattr(target, name)
        except Exception as error:  # the user's own code
            raise UsageError(
                f"{self.text} cannot be imported: {reason(error)}; run vivace in the folder of the module"
            ) from error
        if not callable(target):
            raise UsageError(f"{self.text} is not a function")
        function: Callable[..., Any] = target
        return function

    @cached_property
    def probed(self) -> tuple[str, ...]:  # type: ignore[override]
        """The settings that it takes."""
        try:
            parameters = inspect.signature(self.call).parameters
        except (TypeError, ValueError):
            raise UsageError(f"{self.text}: it has no signature; give a function of Python") from None
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [name for name in ("prompt", "seed") if name not in parameters and not takes_any]
        if missing:
            raise UsageError(
                f"{self.text}: it takes no {' and no '.join(missing)}; define def {self.function}(prompt, seed)"
            )
        return tuple(name for name in SETTINGS if takes_any or name in parameters)

    def check(self, plan: ProofPlan) -> None:
        assert self.probed is not None

    def draw(self, job: DrawJob) -> DrawnImage:
        call = {name: value for name, value in job.settings.call.items() if name in self.probed}
        began = time.monotonic()
        try:
            output = self.call(prompt=job.prompt, seed=job.seed, **call)
        except Exception as error:  # the user's own code
            raise DrawingFailure(f"{type(error).__name__}: {reason(error)}") from error
        seconds = time.monotonic() - began
        if isinstance(output, bytes):
            return DrawnImage(output, suffix_of(output), seconds, settings=call)
        image, faults = _picture(output)
        return DrawnImage(as_png(image), ".png", seconds, faults, settings=call)


def _picture(output: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a function's result as a PIL image, and its faults that a file does not show."""
    import numpy as np
    from PIL import Image

    images = getattr(output, "images", output)
    if isinstance(images, list):
        if len(images) != 1:
            raise DrawingFailure(f"the function returned {len(images)} images; it must return one")
        images = images[0]
    if isinstance(images, Image.Image):
        return images, ()
    array = np.asarray(images)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype.kind not in "uif":
        raise DrawingFailure(
            f"the function returned {type(output).__name__}; it must return a PIL image, an array of shape "
            "(H, W, 3), or the bytes of an image file"
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array), ()
    faults = () if np.isfinite(array).all() else ("not finite",)
    finite = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return Image.fromarray(np.round(255 * finite.clip(0, 1)).astype(np.uint8)), faults
