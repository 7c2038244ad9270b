"""Phases of a worker while a command waits for it: a live line on a terminal, and how long each took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn

from vivace.answers.formatting import seconds
from vivace.cli.display.terminal import console


class Phases:
    """Follows a request by its worker's events of phases. Used as a context; it ends with the last phase.

    Args:
        words: names of phases for readers, where they differ; {call} is the number of the call.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        self._words = words or {}
        self._took: dict[str, float] = defaultdict(float)
        self._phase: str | None = None
        self._since = 0.0
        terminal = console(stderr=True)
        self._line = Progress(
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Phases:
        self._phase, self._since = "start", time.monotonic()
        self._line.start()
        self._task = self._line.add_task("starting a process")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._line.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Record an event of the worker; events other than phases change nothing."""
        if event.get("event") != "phase":
            return
        self._end()
        self._phase = event["phase"]
        words = self._words.get(event["phase"], event["phase"]).format(call=event.get("done", 0) + 1)
        assert self._task is not None
        self._line.reset(self._task, description=words)

    def took(self) -> str:
        """Return how long the phases took, e.g. "start 5.10 s, load 1.20 s, warm-up 3.40 s"."""
        return ", ".join(f"{phase} {seconds(took)}" for phase, took in self._took.items())

    def _end(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._took[self._phase] += now - self._since
        self._phase, self._since = None, now
