"""End a call of a session from another thread, and follow its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vivace.errors import Cancelled
from vivace.machinery.technique import Effect

OnStep = Callable[[int, Any, int, int], None]
"""Called after each denoising step with its number, counted from 1, the latents, and the height and width in pixels."""


class CallInProgress:
    """The call in progress of a session: whether it was cancelled, and its callback."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._is_running = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin a call. An earlier cancel does not end it."""
        with self._lock:
            self._cancelled.clear()
            self._is_running = True

    def end(self) -> None:
        with self._lock:
            self._is_running = False

    def cancel(self) -> bool:
        """Let the call in progress end at its next step; return whether there is one."""
        with self._lock:
            if self._is_running:
                self._cancelled.set()
            return self._is_running

    def check(self) -> None:
        """Raise Cancelled if the call was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled("the call was cancelled")

    def watching(self, on_step: OnStep | None, call: dict[str, Any]) -> Effect:
        """Return an effect whose step end checks for a cancel and calls `on_step`."""

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.check()
            if on_step is not None:
                height, width = (int(call.get(name) or 0) for name in ("height", "width"))
                on_step(step + 1, tensors.get("latents"), height, width)
            return {}

        return Effect(step_end=step_end, step_end_inputs=("latents",) if on_step is not None else ())
