"""The progress of a worker's start: its phases, the seconds of each, and how long the last start of the same took.

`serve-last-starts.json` of vivace's cache folder has the last start of each model, recipe, device and set of sizes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from vivace.errors import VivaceError
from vivace.foundation.hardware.this_machine import this_gpu
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder
from vivace.serve.settings import ServeSettings

LOG = logging.getLogger("vivace.serve")
FIRST_PHASE = "starting a process"
_FILE = "serve-last-starts.json"
_KEPT = 300
_FACTOR = 10.0
"""How many times the seconds of the last start a phase may take until the worker counts as hung."""
_FLOOR_S = 900.0
_FIRST_S = 3600.0
"""The limit of a phase that the last start did not have: weights may be downloaded, and kernels compiled."""


@dataclass(frozen=True)
class PastStart:
    """Seconds of a start that ended with a worker that draws, and of each of its phases."""

    seconds: float
    phases: dict[str, float]


_STARTS = TypeAdapter(dict[str, PastStart])


def past_starts() -> dict[str, PastStart]:
    """Return the last start of each key, see `key_of`; none if the file is missing or cannot be read."""
    path = cache_folder() / _FILE
    try:
        return _STARTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        LOG.warning("%s has no times of starts (%s); it is written anew", path, str(error).splitlines()[0])
        return {}


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
        f"{len(settings.lora_files())} LoRAs",
    )
    return " | ".join(parts)


class Startup:
    """A start in progress: its phase, and the time in it since the process began, by `time.monotonic()`."""

    def __init__(self, key: str, began: float) -> None:
        self._key, self._began = key, began
        self._marks: list[tuple[str, float]] = [(FIRST_PHASE, began)]
        self._last = past_starts().get(key)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def limit_s(self) -> float:
        """Seconds that the phase may take until the worker counts as hung: it may have been slow, but not that slow."""
        last_s = self._last_of_phase
        return _FIRST_S if last_s is None else max(_FLOOR_S, _FACTOR * last_s)

    @property
    def _last_of_phase(self) -> float | None:
        return None if self._last is None else self._last.phases.get(self._marks[-1][0])

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - (time.monotonic() - self._marks[-1][1]))

    @property
    def complaint(self) -> str:
        last_s = self._last_of_phase
        before = (
            "the last start did not have it" if last_s is None else f"it took {last_s:.1f} s the last time"
        )
        return f"it hung: {self._marks[-1][0]} took more than {self.limit_s:.0f} s, and {before}"

    @property
    def expectation(self) -> str:
        if self._last is None:
            return "it is the first start of this model, recipe, device and sizes, so how long it takes is not known"
        return f"about {self._last.seconds:.1f} s, as the last start took"

    def enter(self, phase: str, at: float | None = None) -> None:
        """Note that a phase begins, at a `time.monotonic()`, whose zero all processes of a machine share, or now."""
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
        """Store the time of the start; return it in words. A failure to store it is only logged."""
        seconds, phases = self.seconds, self.phases()
        starts = past_starts()
        starts.pop(self._key, None)  # so that it becomes the newest
        starts[self._key] = PastStart(
            round(seconds, 3), {name: round(each, 3) for name, each in phases.items()}
        )
        kept = dict(list(starts.items())[-_KEPT:])
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            replace(cache_folder() / _FILE, _STARTS.dump_json(kept, indent=1))
        except (OSError, VivaceError) as error:
            LOG.warning("how long this start took cannot be kept, for the next one's estimate: %s", error)
        return f"ready after {seconds:.1f} s: " + ", ".join(
            f"{name} {each:.1f}" for name, each in phases.items()
        )

    def health(self) -> dict[str, Any]:
        """Return its part of /readyz."""
        return {
            "seconds": round(self.seconds, 1),
            "expected_seconds": None if self._last is None else round(self._last.seconds, 1),
            "phases": {name: round(each, 1) for name, each in self.phases().items()},
            "phase_limit_seconds": round(self.limit_s, 1),
        }
