"""Every error that vivace raises on purpose.

    VivaceError                     base; `exit_code` is what the command line returns
    ├── UsageError (ValueError)     2: invalid command line or argument
    │   ├── RecipeError             a recipe does not parse, or names something unknown
    │   └── WorkloadError           invalid prompts, sizes, steps, ...
    ├── UnknownModel                2: no such model
    ├── UnusableModel               3: not a complete text-to-image pipeline, or damaged
    ├── Unsupported                 3: this machine, model or library cannot do what was asked
    ├── NoEffect                    3: a technique changed nothing
    ├── NotFinite                   3: a call computed NaN or infinity, and there is no image
    ├── StoreError                  3: not a vivace store, or read-only, full or damaged
    ├── OutputError                 3: an image or page cannot be written
    ├── WorkerError                 3: a worker process did not start
    └── Cancelled                   130: a call of a session was cancelled

A message says what was given, what was wanted, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VivaceError(Exception):
    """Base class of all errors that vivace raises on purpose."""

    exit_code = 3


class UsageError(VivaceError, ValueError):
    """Invalid input, found before anything was started."""

    exit_code = 2


class WorkloadError(UsageError):
    """Invalid prompts, sizes or counts."""


class RecipeError(UsageError):
    """An invalid recipe; the message marks the mistake with carets.

    Args:
        problem: what is wrong and what is expected, one line.
        text: the recipe as given.
        start: index of the first wrong character in `text`.
        length: number of wrong characters (at least one caret is printed).
    """

    def __init__(self, problem: str, text: str, start: int, length: int = 1) -> None:
        self.problem = problem
        self.text = text
        self.start = start
        # Long recipes are cut around the mistake, so that the caret stays on the screen.
        lo = max(0, start - 60)
        excerpt = _printable(text[lo : lo + 120])
        width = max(1, min(length, len(excerpt) - (start - lo)))
        super().__init__(f"{problem}\n  {excerpt}\n  {' ' * (start - lo)}{'^' * width}")


class UnknownModel(VivaceError):
    """There is no model and no folder of that name."""

    exit_code = 2


class UnusableModel(VivaceError):
    """The model exists, but is not a complete text-to-image pipeline in safetensors format."""


class Unsupported(VivaceError):
    """This machine, model or library cannot do what was asked; the message says why."""


class Unpredictable(Unsupported):
    """The technique works, but its memory cannot be predicted before it runs."""


class NoEffect(VivaceError):
    """A technique found nothing to change. A silent no-op must never be reported as a result.

    `already_so`: the requested state holds anyway (bf16 of a bf16 model). If another technique of the recipe did
    change something, the recipe then runs with a warning (docs/adr/0002).
    """

    def __init__(self, message: str, *, already_so: bool = False) -> None:
        super().__init__(message)
        self.already_so = already_so


class NotFinite(VivaceError):
    """A call computed NaN or infinity, which would have become a black image."""


class StoreError(VivaceError):
    """The store cannot be read or written. Nothing in it was changed."""


class OutputError(VivaceError):
    """An image or page cannot be written. No partial file is left."""


class WorkerError(VivaceError):
    """A worker process did not start, or violated the protocol."""


class Cancelled(VivaceError):
    """A call of a session was cancelled by `Session.cancel`."""

    exit_code = 130


def nearest(text: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known name, or an empty string."""
    known = list(candidates)
    text = text.lower()
    begun = [name for name in known if len(name) > 3 and text.startswith(f"{name}-")]
    match = [max(begun, key=len)] if begun else difflib.get_close_matches(text, known, n=1, cutoff=0.55)
    return f"; did you mean '{match[0]}'?" if match else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)
