"""A model with a recipe as a source of images."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError
from vivace.foundation.untrusted.reading import reason
from vivace.proofs.sides.drawing import SETTINGS, DrawingFailed, DrawnImage, Settings, as_png

if TYPE_CHECKING:
    from vivace.runtime.request import CheckedRequest


class RecipeOnModel:
    """A recipe, applied to a model that is loaded when the source is entered.

    Args:
        prepared: the model and its recipe, checked, with the workload's settings.
        base: the settings that need not be named, as they are the workload's or the recipe's own; others are given
            to the call itself.
        is_read: called when the model is loaded.
        on_note: called with the session's warnings.
    """

    def __init__(
        self,
        prepared: CheckedRequest,
        base: Settings,
        device: str,
        threads: int | None,
        is_read: Callable[[], None] = lambda: None,
        on_note: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._prepared, self._base = prepared, base
        self._device, self._threads = device, threads
        self._is_read, self._on_note = is_read, on_note
        self._session: Any = None

    def __enter__(self) -> RecipeOnModel:
        import torch

        from vivace.measure.machine import choose_device
        from vivace.models.load import explained
        from vivace.models.quiet import quiet
        from vivace.runtime.workloads import default_threads

        prepared = self._prepared
        torch.set_num_threads(self._threads or default_threads(prepared.located))
        with explained(prepared.located), quiet():
            self._session = prepared.open(choose_device(self._device))
        self._is_read()
        for text in self._session.warnings:
            self._on_note(text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is None:
            return
        import torch

        self._session.close()
        self._session = None
        gc.collect()  # hooks and pipelines refer to each other, and the other side needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image; see `Drawer.draw`."""
        from vivace.models.load import explained
        from vivace.models.quiet import quiet
        from vivace.runtime.calls import generators_of, prompts_of
        from vivace.runtime.safety import EmptyImageWarning, why_empty

        base = self._base.call
        changed = {name: value for name, value in settings.call.items() if base.get(name) != value}
        began = time.monotonic()
        try:
            with explained(self._prepared.located, "does not run"), quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore", EmptyImageWarning)
                call = [(0, prompt, seed)]
                output = self._session(**prompts_of(call), **generators_of(call), **changed)
        except VivaceError as error:
            raise DrawingFailed(str(error)) from error
        except (RuntimeError, MemoryError) as error:  # out of memory
            raise DrawingFailed(reason(error)) from error
        seconds = time.monotonic() - began
        notes = tuple(f"it is {reason}" for reason in why_empty(output) if reason)
        drawn = self._session.defaults | changed
        drawn["scheduler"] = type(getattr(self._session.pipe, "scheduler", None)).__name__
        how = {name: drawn[name] for name in (*SETTINGS, "scheduler") if drawn.get(name) is not None}
        return DrawnImage(as_png(output.images[0]), ".png", seconds, notes=notes, settings=how)
