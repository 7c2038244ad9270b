"""Turns of the sessions of one process: a technique's settings for a call hold for the whole process.

Kernels of attention, TF32 and memory formats of the process are changed around a call and restored after it. Calls of
several threads, of one session or of several, therefore wait for each other. In one thread sessions may be nested, as
where a callback of one calls another; if they are left in another order than that, all settings are restored when the
last of them is left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from vivace.foundation.processes.resident import in_each_child

_TURN = threading.RLock()


@dataclass
class _Entered:
    settings: ExitStack = field(default_factory=ExitStack)
    is_left: bool = False


_ENTERED: list[_Entered] = []


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread is in a call of a session."""
    with _TURN:
        yield


@contextmanager
def settings_of_a_turn() -> Iterator[ExitStack]:
    """Yield a stack of settings of the process, which are restored after those that were made later."""
    with turn():
        entered = _Entered()
        _ENTERED.append(entered)
        try:
            yield entered.settings
        finally:
            entered.is_left = True
            while _ENTERED and _ENTERED[-1].is_left:
                _ENTERED.pop().settings.close()


def _begin_anew() -> None:
    """Reset the lock: a forked child has one thread, which holds nothing."""
    global _TURN
    _TURN = threading.RLock()
    _ENTERED.clear()


in_each_child(_begin_anew)
