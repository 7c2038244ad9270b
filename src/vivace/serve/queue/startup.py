"""The progress of a worker's start: its phases, the seconds of each, and the time of earlier starts of the same.

Starts are kept in `serve-starts.json` of vivace's cache folder, the last few of each model, recipe, device and set of
sizes. Their median is the expectation.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vivace.errors import VivaceError
from vivace.foundation.hardware.this_machine import this_gpu
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import read_json
from vivace.machinery.technique.cache_folder import cache_folder
from vivace.serve.settings import ServeSettings

LOG = logging.getLogger("vivace.serve")
FIRST_PHASE = "starting a process"
_FILE = "serve-starts.json"
_KEPT_OF_EACH = 3
_KEPT = 300
_FACTOR = 10.0
"""How many times the seconds of earlier starts a phase may take until the worker counts as hung."""
_FLOOR_S = 900.0
_FIRST_S = 3600.0
"""The limit of a phase that no earlier start had: weights may be downloaded, and kernels compiled."""


@dataclass(frozen=True)
class PastStart:
    """A start that ended with a worker that draws.

    Attributes:
        key: what was started, see `key_of`.
        seconds: from the process's start until it was ready.
        phases: the seconds of each.
    """

    key: str
    seconds: float
    phases: dict[str, float]


@dataclass
class PastStarts:
    """The starts of one model, recipe, device and set of sizes.

    Attributes:
        key: of these starts; those of others are kept in the same file.
        path: of the file.
    """

    key: str
    path: Path = field(default_factory=lambda: cache_folder() / _FILE)

    @classmethod
    def of(cls, settings: ServeSettings) -> PastStarts:
        return cls(key_of(settings))

    def read(self) -> list[PastStart]:
        """Return the starts, the latest last; none if the file is missing or cannot be read."""
        return [start for start in self._all() if start.key == self.key]

    def add(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Store a start. A failure to store it is only logged."""
        rounded = {name: round(each, 3) for name, each in phases.items()}
        start = PastStart(self.key, round(seconds, 3), rounded)
        others = [each for each in self._all() if each.key != self.key]
        starts = [*others, *self.read()[1 - _KEPT_OF_EACH :], start][-_KEPT:]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace(self.path, json.dumps([asdict(each) for each in starts], indent=0).encode())
        except (OSError, VivaceError) as error:
            LOG.warning("how long this start took cannot be kept, for the next one's estimate: %s", error)

    def _all(self) -> list[PastStart]:
        try:
            content = read_json(self.path)
            if not isinstance(content, list):
                raise TypeError(f"it is a {type(content).__name__}")
            return [_start_of(each) for each in content]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            LOG.warning("%s is not a list of starts (%s); it is written anew", self.path, error)
            return []


def _start_of(fields: Any) -> PastStart:
    phases = {str(name): float(seconds) for name, seconds in fields["phases"].items()}
    return PastStart(str(fields["key"]), float(fields["seconds"]), phases)


def key_of(settings: ServeSettings) -> str:
    """Return the conditions of a start's time, as text: the model, the recipe, the device, and the warmed sizes."""
    device = settings.device if settings.device != "auto" else "gpu" if this_gpu() else "cpu"
    parts = (
        settings.model,
        settings.recipe,
        device if device == "cpu" else f"{device} {this_gpu()}",
        f"{settings.threads or 'own'} threads",
        ",".join(map(str, settings.sizes)) or "own size",
        settings.task or "every task",
        f"batches {','.join(map(str, settings.batches)) or 'none'}",
        f"{len(settings.loras)} LoRAs",
    )
    return " | ".join(parts)


class Startup:
    """A start in progress: its phase, and the time in it.

    Args:
        past: earlier starts of the same.
        began: `time.monotonic()` when the process was started.
    """

    def __init__(self, past: PastStarts, began: float) -> None:
        self._past, self._began = past, began
        self._marks: list[tuple[str, float]] = [(FIRST_PHASE, began)]
        starts = past.read()
        self._longest = {
            name: max(start.phases[name] for start in starts if name in start.phases)
            for name in {name for start in starts for name in start.phases}
        }
        before = [start.seconds for start in starts]
        self.expected_s: float | None = statistics.median(before) if before else None
        """Expected seconds of the whole start; None if it is the first one of its kind."""
        self._num_before = len(before)

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._began

    @property
    def limit_s(self) -> float:
        """Seconds that the phase may take until the worker counts as hung: it may have been slow, but not that slow."""
        longest = self._longest.get(self._marks[-1][0])
        return _FIRST_S if longest is None else max(_FLOOR_S, _FACTOR * longest)

    @property
    def left_s(self) -> float:
        """Seconds until the phase is at its limit."""
        return max(0.0, self.limit_s - (time.monotonic() - self._marks[-1][1]))

    @property
    def complaint(self) -> str:
        """What is wrong with a phase that is at its limit, in words."""
        name, _ = self._marks[-1]
        longest = self._longest.get(name)
        before = "no earlier start had it" if longest is None else f"it took {longest:.1f} s at most before"
        return f"it hung: {name} took more than {self.limit_s:.0f} s, and {before}"

    @property
    def expectation(self) -> str:
        """The expected time, in words."""
        if self.expected_s is None:
            return "it is the first start of this model, recipe, device and sizes, so how long it takes is not known"
        starts = "the last start" if self._num_before == 1 else f"the last {self._num_before} starts"
        return f"about {self.expected_s:.1f} s, as {starts} took"

    def enter(self, phase: str, at: float | None = None) -> None:
        """Note that a phase begins.

        Args:
            at: when, by `time.monotonic()`, whose zero all processes of a machine share; None for now.
        """
        at = time.monotonic() if at is None else at
        self._marks.append((phase, max(at, self._marks[-1][1])))

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase until now, in order."""
        ends = [mark for _, mark in self._marks[1:]] + [time.monotonic()]
        seconds: dict[str, float] = {}
        for (name, began), end in zip(self._marks, ends, strict=True):
            seconds[name] = seconds.get(name, 0.0) + end - began
        return seconds

    def finish(self) -> str:
        """Store the time of the start; return it in words."""
        seconds, phases = self.seconds, self.phases()
        self._past.add(seconds, phases)
        return f"ready after {seconds:.1f} s: " + ", ".join(
            f"{name} {each:.1f}" for name, each in phases.items()
        )

    def health(self) -> dict[str, Any]:
        """Return its part of /readyz."""
        return {
            "seconds": round(self.seconds, 1),
            "expected_seconds": None if self.expected_s is None else round(self.expected_s, 1),
            "phases": {name: round(each, 1) for name, each in self.phases().items()},
            "phase_limit_seconds": round(self.limit_s, 1),
        }
