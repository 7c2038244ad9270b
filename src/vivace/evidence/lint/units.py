"""Units as people write them in tables: of time, size and rate."""

from __future__ import annotations

import re

_TIMES = {
    1.0: ("s", "sec", "secs", "second", "seconds"),
    1e-3: ("ms", "msec", "msecs", "millisecond", "milliseconds"),
    1e-6: ("us", "µs", "μs", "usec", "microsecond", "microseconds"),
    1e-9: ("ns", "nanosecond", "nanoseconds"),
    60.0: ("min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
}
_SIZES = {
    1.0: ("b", "byte", "bytes"),
    1e3: ("kb",), 1e6: ("mb",), 1e9: ("gb", "gigabytes"), 1e12: ("tb",),
    2.0**10: ("kib",), 2.0**20: ("mib",), 2.0**30: ("gib",), 2.0**40: ("tib",),
}  # fmt: skip
_SHARES = {
    "percent": ("%", "percent", "pct", "% faster", "% slower", "% quicker", "% less", "% lower", "% more", "% higher",
                "percent faster", "percent slower", "% speedup", "% speed-up", "% improvement", "% reduction"),
    "ratio": ("x", "×", "x faster", "× faster", "x slower", "× slower", "times", "times faster", "times slower",
              "x speedup", "x speed-up", "-fold", "fold"),
}  # fmt: skip
IMAGES = (
    "img",
    "imgs",
    "image",
    "images",
    "pic",
    "pics",
    "picture",
    "pictures",
    "sample",
    "samples",
    "frame",
    "frames",
)
STEPS = ("it", "its", "iter", "iters", "iteration", "iterations", "step", "steps")
CALLS = ("call", "calls", "run", "prompt", "request", "generation", "batch")


def _by_name(units: dict[float, tuple[str, ...]], kind: str) -> dict[str, tuple[str, float]]:
    return {name: (kind, factor) for factor, names in units.items() for name in names}


SECONDS = {name: factor for name, (_, factor) in _by_name(_TIMES, "time").items()}
UNITS: dict[str, tuple[str, float]] = (
    _by_name(_TIMES, "time")
    | _by_name(_SIZES, "bytes")
    | {name: (kind, 1.0) for kind, names in _SHARES.items() for name in names}
    | {"fps": ("images a second", 1.0)}
)
"""The kind and factor of each unit; seconds and bytes are the units inside."""


def unit_of(text: str) -> tuple[str, float] | None:
    """Return the kind of a unit and its factor to seconds, bytes, or one a second; None if it is unknown.

    Kinds: "time", "bytes", "percent", "ratio", "images a second", "steps a second", "time an image", "time a step". A
    call's time is "time".
    """
    name = re.sub(r"\s*(?:/|\bper\b|\ban?\b(?=\s+\w))\s*", "/", " ".join(text.lower().split())).strip(". ")
    if name in UNITS:
        return UNITS[name]
    above, slash, below = name.partition("/")
    if not slash:
        return None
    if below in SECONDS and above in (*IMAGES, *STEPS):
        kind = "images a second" if above in IMAGES else "steps a second"
        return kind, 1 / SECONDS[below]
    if above in SECONDS:
        for names, kind in ((IMAGES, "time an image"), (STEPS, "time a step"), (CALLS, "time")):
            if below in names:
                return kind, SECONDS[above]
    return None
