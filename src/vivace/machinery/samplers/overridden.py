"""Methods of one scheduler that are replaced so that copies of it work.

A function that is put on an instance refers to that instance. A copy (`copy.deepcopy`, as diffusers' maintainers advise
for threads) would carry the function and step the original. So the instance gets a class of its own, derived from its
class and called like it. Neither its class nor other instances change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]
"""Takes the scheduler first."""


def override(scheduler: Any, name: str, made_of: Callable[[Method], Method]) -> None:
    """Replace a method of one scheduler.

    Args:
        made_of: returns the new method of the one before it; both take the scheduler first.
    """
    kind = type(scheduler)
    before: Method = getattr(kind, name)
    own = vars(scheduler).pop(name, None)
    if own is not None:  # a caller's own, of this instance alone
        before = _without_self(own)
    method = functools.wraps(getattr(kind, name))(made_of(before))
    called_alike = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), {**called_alike, name: method})


def _without_self(function: Callable[..., Any]) -> Method:
    return lambda _, *args, **kwargs: function(*args, **kwargs)
