"""Every error that vivace raises on purpose.

    VivaceError                     base; `exit_code` is what the command line returns
    ├── UsageError (ValueError)     2: what was typed is wrong
    │   ├── RecipeError             a recipe does not parse, or names what does not exist
    │   └── WorkloadError           prompts, sizes, steps, ... that cannot be drawn
    ├── UnknownModel                2: no such model here
    ├── UnusableModel               3: what is there is no model, or a damaged one
    ├── Unsupported                 3: this machine, model or library cannot do what was asked
    ├── NoEffect                    3: a technique that changed nothing
    ├── StoreError                  3: the store is not ours, read-only, full or damaged
    ├── OutputError                 3: a picture or page cannot be written
    └── WorkerError                 3: a worker process could not even start

A message says what was given, what was wanted, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VivaceError(Exception):
    """Base of all errors that a user can cause."""

    exit_code = 3


class UsageError(VivaceError, ValueError):
    """What was typed is wrong; nothing has been started."""

    exit_code = 2


class WorkloadError(UsageError):
    """Prompts, sizes or counts that cannot be drawn."""


class RecipeError(UsageError):
    """A wrong recipe, with the place marked by a caret.

    Args:
        problem: what is wrong and what was wanted, one line.
        text: the recipe as given.
        start: index of the first wrong character in `text`.
        length: how many characters are wrong (at least one caret is drawn).
    """

    def __init__(self, problem: str, text: str, start: int, length: int = 1) -> None:
        self.problem = problem
        self.text = text
        self.start = start
        # A long recipe is cut to the neighbourhood of the mistake, so that the caret stays on the screen.
        lo = max(0, start - 60)
        shown = _printable(text[lo : lo + 120])
        width = max(1, min(length, len(shown) - (start - lo)))
        super().__init__(f"{problem}\n  {shown}\n  {' ' * (start - lo)}{'^' * width}")


class UnknownModel(VivaceError):
    """No model of that name, and no such folder."""

    exit_code = 2


class UnusableModel(VivaceError):
    """There is something of that name, but no whole pipeline in safetensors that draws pictures from text."""


class Unsupported(VivaceError):
    """This machine, model or library cannot do it; the message says why."""


class NoEffect(VivaceError):
    """A technique that found nothing to change. A silent no-op must never become a row.

    `already_so` marks that what was asked for holds without it (bf16 asked of a bf16 model). A recipe in which
    another technique did change something then goes on, with a warning (docs/adr/0002).
    """

    def __init__(self, message: str, *, already_so: bool = False) -> None:
        super().__init__(message)
        self.already_so = already_so


class StoreError(VivaceError):
    """The store cannot be read or written; nothing in it was changed."""


class OutputError(VivaceError):
    """A picture or page cannot be written; nothing half-written is left."""


class WorkerError(VivaceError):
    """A worker process could not be started, or broke its side of the conversation."""


def nearest(given: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest known name, or an empty string."""
    match = difflib.get_close_matches(given.lower(), list(known), n=1, cutoff=0.55)
    return f"; did you mean '{match[0]}'?" if match else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)
